// Asking for answers: settings, streams, and what goes wrong with them.

const PARAMETERS = [
  // name, label, lowest, highest, whole numbers only
  ["temperature", "Temperature", 0, 100, false],
  ["top_p", "Top p", 0, 1, false],
  ["top_k", "Top k", -1, 1e9, true],
  ["min_p", "Min p", 0, 1, false],
  ["repetition_penalty", "Repetition penalty", 0, 100, false],
  ["max_tokens", "Max tokens", 1, 1e9, true],
  ["seed", "Seed", -9007199254740991, 9007199254740991, true],
];
const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};
const PAGE_LEFT = "The page was left before the answer was complete.";
const MOST_TRIES = 5; // of a request that the server has no room for

const settings = {
  build() {
    for (const [name, label, min, max, whole] of PARAMETERS) {
      const attributes = { id: name, type: "number", min, max, step: whole ? 1 : "any", placeholder: "default" };
      $("parameters").append(make("label", {}, label, make("input", attributes)));
    }
    $("schema").value = JSON.stringify(EXAMPLE_SCHEMA, null, 2);
    const kept = keep.read("localStorage", "settings") ?? {};
    for (const field of this.fields()) {
      if (field.type === "checkbox") field.checked = Boolean(kept[field.id]);
      else if (kept[field.id]) field.value = kept[field.id];
    }
    $("settings").addEventListener("input", () => this.changed());
    $("reset").addEventListener("click", () => {
      for (const field of this.fields()) {
        if (field.type === "checkbox") field.checked = false;
        else field.value = field.id === "schema" ? JSON.stringify(EXAMPLE_SCHEMA, null, 2) : "";
      }
      this.changed();
    });
    this.changed();
  },

  fields() {
    return [...$("settings").querySelectorAll("input, textarea")];
  },

  changed() {
    keep.write("localStorage", "settings", Object.fromEntries(
      this.fields().map((field) => [field.id, field.type === "checkbox" ? field.checked : field.value]),
    ));
    $("schema").hidden = !$("schema-on").checked;
    const told = PARAMETERS.filter(([name]) => $(name).value !== "").map(([name, label]) => `${label} ${$(name).value}`);
    if ($("system").value.trim()) told.unshift("system prompt");
    if ($("schema-on").checked) told.push("JSON schema");
    say($("settings-summary"), told.join(", "));
    this.schema();
  },

  /** The schema that answers follow; null if none is wanted, undefined if it is no JSON. */
  schema() {
    say($("schema-error"), "");
    if (!$("schema-on").checked) return null;
    try {
      return JSON.parse($("schema").value);
    } catch (error) {
      say($("schema-error"), `The schema is not JSON: ${error.message}.`);
      return undefined;
    }
  },

  /** The fields of a request; undefined if something is wrong, which has been said. */
  body() {
    const body = {};
    for (const [name] of PARAMETERS) {
      const field = $(name);
      if (!field.checkValidity()) {
        $("settings").open = true;
        field.reportValidity();
        return undefined;
      }
      if (field.value !== "") body[name] = Number(field.value);
    }
    const schema = this.schema();
    if (schema === undefined) {
      $("settings").open = true;
      $("schema").focus();
      return undefined;
    }
    if (schema !== null) {
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    }
    return body;
  },
};

const chat = {
  running: null, // the AbortController of the answer that is coming
  requestId: "", // of that answer, or of the last
  leaving: false, // a browser that leaves the page breaks its answer off

  send() {
    const text = $("message").value.trim();
    if (!text || this.running) return;
    if (settings.body() === undefined) return;
    $("message").value = "";
    fitMessage();
    conversation.add({ role: "user", content: text });
    this.answer();
  },

  again() {
    if (this.running) return;
    const last = conversation.messages.at(-1);
    if (last?.role === "assistant") {
      if (settings.body() === undefined) return;
      conversation.remove(last);
    }
    this.answer();
    $("message").focus();
  },

  stop() {
    this.running?.abort();
  },

  async answer() {
    const body = settings.body();
    const system = $("system").value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation.history()];
    const answer = conversation.add({ role: "assistant", content: "", state: "waiting", stats: {} });
    answer.form = Boolean(body.response_format);
    this.running = new AbortController();
    this.showBusy();
    try {
      const whole = {
        ...body,
        model: $("model").value || undefined,
        messages,
        stream: true,
        stream_options: { include_usage: true, continuous_usage_stats: true },
      };
      await this.read(answer, await this.ask(answer, whole));
      answer.state = "done";
    } catch (error) {
      answer.state = this.running.signal.aborted ? "stopped" : "failed";
      if (answer.state === "failed") answer.problem = answer.content ? `The answer broke off. ${error.message}` : error.message;
      if (this.leaving && answer.state === "failed") answer.problem = PAGE_LEFT;
      else if (error instanceof Unreachable) server.lost();
    } finally {
      this.running = null;
      conversation.draw(answer);
      conversation.refresh();
      conversation.save();
      this.showBusy();
      if (conversation.isAtEnd()) conversation.follow();
    }
  },

  /** Sends a request, again and again while the server says that it has no room now. */
  async ask(answer, body) {
    for (let tries = 1; ; tries += 1) {
      try {
        return await ask("v1/chat/completions", { body, signal: this.running.signal });
      } catch (error) {
        if (error.status !== 503 || tries >= MOST_TRIES) throw error;
        for (let left = error.retryAfter ?? 2; left > 0; left -= 1) {
          answer.stats.note = `${error.message} Trying again in ${left} s (${tries} of ${MOST_TRIES - 1}).`;
          conversation.update(answer);
          await pause(1, this.running.signal);
        }
        delete answer.stats.note;
        conversation.update(answer);
      }
    }
  },

  async read(answer, response) {
    const { stats } = answer;
    let first = 0;
    let ended = false;
    for await (const data of eventsOf(response)) {
      if (data === "[DONE]") return;
      const chunk = toldBy(data);
      if (chunk.id) this.requestId = chunk.id;
      const now = performance.now();
      const choice = choiceOf(chunk);
      const { content, reasoning_content: thinking } = choice?.delta ?? {};
      if (content || thinking) {
        if (!first) {
          first = now;
          stats.firstToken = (now - response.started) / 1000;
        }
        answer.state = "streaming";
        answer.content += content ?? "";
        answer.thinking = (answer.thinking ?? "") + (thinking ?? "");
      }
      if (choice?.finish_reason) {
        stats.end = String(choice.finish_reason);
        ended = true;
      }
      if (Number.isFinite(chunk.usage?.completion_tokens) && Number.isFinite(chunk.usage.prompt_tokens)) {
        stats.tokens = chunk.usage.completion_tokens;
        stats.prompt = chunk.usage.prompt_tokens;
        stats.cached = Number(chunk.usage.prompt_tokens_details?.cached_tokens) || 0;
        const seconds = (now - first) / 1000;
        if (first && stats.tokens > 1 && seconds > 0 && content) stats.perSecond = (stats.tokens - 1) / seconds;
      }
      conversation.update(answer);
    }
    if (!ended) throw new Unreachable();
  },

  showBusy() {
    $("stop").hidden = !this.running;
    $("send").disabled = Boolean(this.running);
    $("clear").disabled = Boolean(this.running);
  },
};

/** The choice that a chunk of an answer holds, if it holds one; its texts are texts. */
function choiceOf({ choices }) {
  const choice = (Array.isArray(choices) ? choices[0] : choices) ?? null;
  if (choice === null) return null;
  const { content, reasoning_content: thinking } = choice.delta ?? {};
  const right = Array.isArray(choices) && isObject(choice) && isObject(choice.delta ?? {});
  if (!right || ![content ?? "", thinking ?? ""].every((text) => typeof text === "string")) {
    throw new ServerError(`The server did not answer as OpenAI does; \`choices\`: ${shortened(JSON.stringify(choices))}`);
  }
  return choice;
}

function fitMessage() {
  const box = $("message");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, 200)}px`;
}
