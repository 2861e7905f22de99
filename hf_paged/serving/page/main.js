// The connection, and everything that is clicked or typed.

const WAITS = [0.5, 1, 2, 3, 5]; // seconds between tries to connect
const SILENCE = 15; // seconds without a sign after which a stream is given up

const server = {
  state: "connecting",
  stream: null, // the AbortController of the stream of events
  version: null,

  /** Follows the engine's events for as long as the page is seen, and comes back whenever they break off. */
  async follow() {
    for (let failed = 0; ; ) {
      if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
      this.stream = new AbortController();
      let wait = 0;
      try {
        this.connected(await this.loadModels());
        failed = 0;
        await this.take(await ask("engine/events", { signal: this.stream.signal }));
        this.lost();
      } catch (error) {
        wait = this.failed(error);
      }
      failed += 1;
      if (wait === null) await key.next();
      else await pause(wait || WAITS[Math.min(failed, WAITS.length) - 1]);
    }
  },

  async take(response) {
    let timer = 0;
    try {
      for await (const data of eventsOf(response)) {
        clearTimeout(timer);
        timer = setTimeout(() => this.stream.abort(), SILENCE * 1000);
        const told = toldBy(data);
        if (this.state === "lost") this.connected(""); // an answer had broken off, and this did not
        this.checkVersion(told.about);
        engine.take(told);
      }
    } finally {
      clearTimeout(timer);
    }
  },

  /** What to do about an error: the seconds to wait, 0 for as usual, null until a key is typed in. */
  failed(error) {
    if (document.hidden) return 0.1; // the stream was let go
    if (error.status === 401) {
      this.tell("locked", "A key is needed");
      this.problem("Type the key in to see the engine.");
      return null;
    }
    if (!(error instanceof ServerError || error instanceof Unreachable || error.name === "AbortError")) {
      console.error(error); // a mistake of ours
    }
    if (this.state !== "connected" || !(error instanceof ServerError)) {
      this.lost();
      return 0;
    }
    const hides = error.status === 404;
    this.problem(hides ? "This server does not show its engine." : error.message);
    return hides ? 30 : error.retryAfter ?? 0;
  },

  problem(text) {
    say($("engine-problem"), text);
    $("engine-problem").hidden = !text;
  },

  lost() {
    if (this.state === "lost") return;
    this.tell("lost", "Connection lost, reconnecting…");
    this.problem(""); // of an engine that nobody sees now
  },

  connected(notice) {
    const text = this.state === "lost" ? "Connected again" : "Connected";
    if (this.state !== "connected" || notice) this.tell("connected", notice || text);
    this.problem("");
  },

  tell(state, text) {
    this.state = state;
    $("connection").dataset.state = state;
    say($("connection"), text);
    document.body.dataset.connection = state;
  },

  checkVersion(about) {
    if (!about) return;
    if (this.version && this.version !== about.version) {
      this.tell("connected", `The server is now version ${about.version}: reload the page`);
    }
    this.version = about.version;
  },

  /** Fills the list of models; returns what a person has to know about it. */
  async loadModels() {
    const list = $("model");
    const before = list.value;
    const { data } = await (await ask("v1/models")).json();
    list.replaceChildren(...data.map(({ id, max_model_len: length }) =>
      make("option", { value: id, title: `context of ${length} tokens` }, id)));
    list.disabled = false;
    if (data.some(({ id }) => id === before)) list.value = before;
    else if (before) return `Connected; the model is now ${data[0].id}`;
    return "";
  },
};

const theme = {
  names: ["auto", "light", "dark"],

  set(name) {
    if (name === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.dataset.theme = name;
    say($("theme-button"), `Theme: ${name}`);
    keep.write("localStorage", "theme", name === "auto" ? null : name);
  },

  next() {
    const now = document.documentElement.dataset.theme ?? "auto";
    this.set(this.names[(this.names.indexOf(now) + 1) % this.names.length]);
  },
};

const narrow = matchMedia("(max-width: 60rem)");

function showEngine(shown) {
  document.body.classList.toggle("without-engine", !shown);
  $("engine-button").setAttribute("aria-expanded", shown);
  engine.redraw();
}

function start() {
  $("key-button").hidden = !key.value;
  theme.set(keep.read("localStorage", "theme") ?? "auto");
  settings.build();
  engine.build();
  for (const message of conversation.messages) {
    if (message.state === "streaming" || message.state === "waiting") Object.assign(message, { state: "failed", problem: PAGE_LEFT });
    conversation.show(message);
  }
  chat.showBusy();
  engine.describe();
  showEngine(!narrow.matches);
  narrow.addEventListener("change", () => showEngine(!narrow.matches));

  $("theme-button").addEventListener("click", () => theme.next());
  $("engine-button").addEventListener("click", () => showEngine(document.body.classList.contains("without-engine")));
  $("key-button").addEventListener("click", async () => {
    if ((await key.ask()) && server.state !== "locked") server.stream?.abort(); // and it connects with the new key
  });
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    chat.send();
  });
  $("message").addEventListener("input", fitMessage);
  $("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      chat.send();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && chat.running && !$("key-dialog").open) {
      event.preventDefault();
      chat.stop();
      $("message").focus();
    }
  });
  $("stop").addEventListener("click", () => {
    chat.stop();
    $("message").focus();
  });
  $("clear").addEventListener("click", () => {
    conversation.clear();
    $("message").focus();
  });
  for (const button of $("suggestions").querySelectorAll("button")) {
    button.addEventListener("click", () => {
      $("message").value = button.textContent;
      chat.send();
    });
  }
  document.addEventListener("visibilitychange", () => document.hidden && server.stream?.abort());
  window.addEventListener("beforeunload", () => (chat.leaving = true)); // some break off before the next, some do not tell
  window.addEventListener("pagehide", () => {
    chat.leaving = true;
    conversation.save();
  });
  window.addEventListener("pageshow", () => (chat.leaving = false));
  $("message").focus();
  server.follow();
}

start();
