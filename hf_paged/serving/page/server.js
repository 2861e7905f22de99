// Asking the server: the key, errors in words, streams of events.

/** What a server answers that is not 2xx; `message` is its own. */
class ServerError extends Error {
  constructor(message, status = 0, code = null, retryAfter = null) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

/** Nobody answered. */
class Unreachable extends Error {
  constructor() {
    super("The server cannot be reached. It may be restarting, or the network is down.");
  }
}

// Paths are relative to the page, which a proxy may have put anywhere.
const HOME = new URL(location.pathname.replace(/\/?$/, "/"), location.origin);
const at = (path) => new URL(path, HOME);

const key = {
  value: ["sessionStorage", "localStorage"].map((store) => keep.read(store, "key")).find((kept) => typeof kept === "string") ?? "",
  waiting: null, // the promise of a key that is being typed
  awaited: [], // whom to tell of the next key

  set(value, kept) {
    this.value = value;
    keep.write("sessionStorage", "key", value || null);
    keep.write("localStorage", "key", kept && value ? value : null);
    for (const resolve of this.awaited.splice(0)) resolve();
  },

  /** Resolves once a key is typed in, wherever on the page that is. */
  next() {
    return new Promise((resolve) => this.awaited.push(resolve));
  },

  /** Opens the dialog; resolves to whether a key was typed. Whoever asks meanwhile waits for the same one. */
  ask(title = "The key of this server", problem = "") {
    this.waiting ??= new Promise((resolve) => {
      const dialog = $("key-dialog");
      $("key-button").hidden = false; // this server wants one
      let typed = false;
      say($("key-title"), title);
      say($("key-problem"), problem);
      $("key").value = this.value;
      $("key-keep").checked = keep.read("localStorage", "key") !== null;
      $("key-form").onsubmit = () => {
        typed = true;
        this.set($("key").value.trim(), $("key-keep").checked);
      };
      $("key-cancel").onclick = () => dialog.close();
      dialog.onclose = () => {
        this.waiting = null;
        resolve(typed);
      };
      dialog.showModal();
      $("key").select();
    });
    return this.waiting;
  },
};

/** Asks a route. Returns the response if it is 2xx, with when it was asked for; asks for a key where one is needed. */
async function ask(path, { body, signal } = {}) {
  for (;;) {
    const used = key.value;
    const headers = used ? { Authorization: `Bearer ${used}` } : {};
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let response;
    const started = performance.now(); // typing a key in does not count
    try {
      response = await fetch(at(path), {
        method: body === undefined ? "GET" : "POST",
        headers,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Unreachable();
    }
    if (response.ok) return Object.assign(response, { started });
    const error = await errorOf(response);
    if (response.status !== 401) throw error;
    if (key.value !== used) continue; // another one was typed meanwhile
    if (!(await key.ask("This server needs a key", used ? "The server refused this key." : ""))) throw error;
  }
}

async function errorOf(response) {
  let told = {};
  try {
    told = (await response.json())?.error ?? {};
  } catch {
    // Whoever is between here and the server writes errors of its own.
  }
  const message = wordsOf(told) || `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  const after = Number(response.headers.get("Retry-After"));
  return new ServerError(message, response.status, told.code, after > 0 ? after : null);
}

/** What an error says, which others write as an object or as a text; "" if nothing. */
function wordsOf(error) {
  const words = error?.message ?? error;
  return typeof words === "string" ? words.trim() : "";
}

/** The object that an event holds; throws the error that it tells of. */
function toldBy(data) {
  let told = null;
  try {
    told = JSON.parse(data);
  } catch {
    // It is no JSON, and so no object.
  }
  if (!isObject(told)) throw new ServerError(`The server sent an event that is no JSON object: ${shortened(data)}`);
  if (told.error) throw new ServerError(wordsOf(told.error) || "The server told of an error, and not of which.", 0, told.error.code);
  return told;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const shortened = (text) => (text.length > 80 ? `${text.slice(0, 80)}…` : text);

/** Yields the data of each server-sent event. A connection that breaks is `Unreachable`. */
async function* eventsOf(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new Unreachable();
      });
      if (done) return;
      text += decoder.decode(value, { stream: true });
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
