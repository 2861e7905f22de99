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
  value: keep.read("sessionStorage", "key") ?? keep.read("localStorage", "key") ?? "",
  waiting: null, // the promise of a key that is being typed

  set(value, kept) {
    this.value = value;
    keep.write("sessionStorage", "key", value || null);
    keep.write("localStorage", "key", kept && value ? value : null);
  },

  /** Opens the dialog; resolves to whether a key was typed. Whoever asks meanwhile waits for the same one. */
  ask(title = "The key of this server", problem = "") {
    this.waiting ??= new Promise((resolve) => {
      const dialog = $("key-dialog");
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

/** Asks a route. Returns the response if it is 2xx; asks for a key where one is needed. */
async function ask(path, { body, signal } = {}) {
  for (;;) {
    const used = key.value;
    const headers = used ? { Authorization: `Bearer ${used}` } : {};
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let response;
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
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401) throw error;
    if (key.value !== used) continue; // another one was typed meanwhile
    if (!(await key.ask("This server needs a key", used ? "The server refused this key." : ""))) throw error;
  }
}

async function errorOf(response) {
  let told = {};
  try {
    told = (await response.json()).error ?? {};
  } catch {
    // Whoever is between here and the server writes errors of its own.
  }
  const message = told.message ?? `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  const after = Number(response.headers.get("Retry-After"));
  return new ServerError(message, response.status, told.code, after > 0 ? after : null);
}

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
