// The messages: what they are, and how they look.

const MOST_MARKED = 200_000; // characters; each mark makes an element, and a browser has to draw them all

/** The messages that were kept; what is none of ours, or was damaged, is left out. */
function keptMessages() {
  const kept = keep.read("sessionStorage", "messages");
  return Array.isArray(kept) ? kept.filter(isMessage) : [];
}

function isMessage(message) {
  const { role, content, thinking = "", problem = "", stats = {} } = message ?? {};
  const known = role === "user" || role === "assistant";
  if (!known || ![content, thinking, problem].every((text) => typeof text === "string")) return false;
  if (stats === null || typeof stats !== "object") return false;
  const types = { end: "string", note: "string" };
  return Object.entries(stats).every(([name, value]) => typeof value === (types[name] ?? "number"));
}

const conversation = {
  messages: keptMessages(), // {role, content, state, thinking, form, stats, problem}
  nodes: new Map(),

  save() {
    keep.write("sessionStorage", "messages", this.messages);
  },

  add(message) {
    this.messages.push(message);
    this.show(message);
    this.save();
    return message;
  },

  remove(message) {
    this.messages = this.messages.filter((other) => other !== message);
    this.nodes.get(message)?.article.remove();
    this.nodes.delete(message);
    this.save();
    this.refresh();
  },

  clear() {
    for (const { article } of this.nodes.values()) article.remove();
    this.nodes.clear();
    this.messages = [];
    this.save();
    this.refresh();
  },

  /** What the server is sent of it: the last question, and before it those that have an answer. */
  history() {
    const { messages } = this;
    const isSent = ({ role, content }, place) => content && !(role === "user" && messages[place + 1]?.content === "");
    return messages.filter(isSent).map(({ role, content }) => ({ role, content }));
  },

  show(message) {
    const isUser = message.role === "user";
    const thinking = make("pre", { class: "thinking-text" });
    const node = {
      text: make("div", { class: "text" }),
      thinking,
      details: make("details", { class: "thinking", hidden: true }, make("summary", {}, "Thinking"), thinking),
      problem: make("p", { class: "problem", role: "alert", hidden: true }),
      stats: make("span", { class: "stats" }),
      buttons: make("span", { class: "buttons" }),
      drawing: false,
    };
    node.article = make(
      "article",
      { class: `message ${message.role}`, "aria-label": isUser ? "You" : "Model" },
      isUser ? null : node.details,
      node.text,
      node.problem,
      make("footer", {}, node.stats, node.buttons),
    );
    this.nodes.set(message, node);
    $("conversation").append(node.article);
    this.draw(message);
    this.refresh();
    this.follow(true);
  },

  /** Has a message drawn with the next picture of the screen. */
  update(message) {
    const node = this.nodes.get(message);
    if (!node || node.drawing) return;
    node.drawing = true;
    requestAnimationFrame(() => {
      node.drawing = false;
      const atEnd = this.isAtEnd();
      this.draw(message);
      if (atEnd) this.follow();
    });
  },

  draw(message) {
    const node = this.nodes.get(message);
    if (!node) return;
    node.article.dataset.state = message.state ?? "done";
    node.article.setAttribute("aria-busy", message.state === "streaming" || message.state === "waiting");
    node.details.hidden = !message.thinking;
    say(node.thinking, message.thinking ?? "");
    node.text.replaceChildren(...(message.role === "user" ? [message.content] : rendered(message)));
    node.problem.hidden = !message.problem;
    say(node.problem, message.problem ?? "");
    say(node.stats, statsText(message));
  },

  /** Only the last answer can be asked for again, and nothing can while one is coming. */
  refresh() {
    $("welcome").hidden = this.messages.length > 0;
    const last = this.messages.at(-1);
    for (const [message, node] of this.nodes) {
      const busy = message.state === "streaming" || message.state === "waiting";
      const buttons = [];
      if (message.role === "assistant" && !busy) {
        if (message.content) buttons.push(make("button", { type: "button", click: (e) => copy(message, e) }, "Copy"));
        if (message === last) {
          const name = message.problem ? "Try again" : "Regenerate";
          buttons.push(make("button", { type: "button", class: "again", click: () => chat.again() }, name));
        }
      }
      node.buttons.replaceChildren(...buttons);
    }
  },

  isAtEnd() {
    const box = $("conversation");
    return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  },

  follow() {
    const box = $("conversation");
    box.scrollTop = box.scrollHeight;
  },
};

function statsText({ content, stats = {}, state, role }) {
  if (role === "user") return "";
  if (state === "waiting") return stats.note ?? "Waiting for the first token…";
  const parts = [];
  if (stats.tokens) parts.push(counted(stats.tokens, "token", "tokens"));
  if (stats.perSecond) parts.push(`${stats.perSecond.toFixed(1)} tokens/s`);
  if (stats.firstToken !== undefined) parts.push(`first token after ${duration(stats.firstToken)}`);
  if (stats.cached) parts.push(`${stats.cached} of ${stats.prompt} prompt tokens cached`);
  if (state === "stopped") parts.push("stopped");
  else if (stats.end === "length") parts.push("cut off at the limit of tokens");
  if (content.length > MOST_MARKED) parts.push("long, and so shown as it was written");
  return parts.join(" · ");
}

async function copy(message, event) {
  const button = event.currentTarget;
  try {
    await navigator.clipboard.writeText(message.content);
    say(button, "Copied");
  } catch {
    say(button, "The browser forbids it");
  }
  setTimeout(() => say(button, "Copy"), 1500);
}

/** Nodes for an answer: code between fences, `code` and **strong** within a line, all else as it was written. */
function rendered({ content, form, state }) {
  if (content.length > MOST_MARKED) return [content];
  if (form && state !== "streaming") {
    try {
      return [make("pre", {}, make("code", {}, JSON.stringify(JSON.parse(content), null, 2)))];
    } catch {
      // Cut off, or not JSON after all: it is shown as it is.
    }
  }
  return content.split(/^```/m).flatMap((part, index) => {
    if (index % 2 === 0) return inline(part);
    return [make("pre", {}, make("code", {}, part.replace(/^[^\n]*\n?/, "").replace(/\n$/, "")))];
  });
}

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part, index) => {
    if (index % 2 === 0) return part;
    return part.startsWith("`") ? make("code", {}, part.slice(1, -1)) : make("strong", {}, part.slice(2, -2));
  });
}
