// Small things that everything else uses. No text ever becomes markup here: elements are made, texts are set.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** Makes an element: attributes by name, `on` handlers as functions, children as nodes or texts. */
function make(tag, attributes = {}, ...children) {
  const svg = tag.startsWith("svg:");
  const node = svg ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Sets a text if it is another one, so that nothing is read out or drawn again for nothing. */
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const pause = (seconds, signal) =>
  new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal?.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });

// What is kept of a visit. A browser may forbid it, or have no room: then nothing is kept.
const keep = {
  read(store, name) {
    try {
      return JSON.parse(window[store].getItem("hf_paged." + name));
    } catch {
      return null;
    }
  },
  write(store, name, value) {
    try {
      if (value === null) window[store].removeItem("hf_paged." + name);
      else window[store].setItem("hf_paged." + name, JSON.stringify(value));
    } catch {
      // It lasts as long as the page then.
    }
  },
};

const counted = (count, one, many) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

function share(part, whole) {
  if (!whole) return "–";
  const percent = (100 * part) / whole;
  if (part && percent < 0.01) return "< 0.01 %";
  return `${percent.toFixed(!part || percent >= 10 ? 0 : percent < 1 ? 2 : 1)} %`;
}

function duration(seconds) {
  if (seconds < 0.0995) return `${(seconds * 1000).toPrecision(2)} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  return seconds < 99.5 ? `${seconds.toPrecision(3)} s` : `${Math.round(seconds)} s`;
}
