// Lines of latencies: the median and the 99th percentile of each five seconds of the last five minutes.

const CHARTS = { first_token: "Time to first token", inter_token: "Between two tokens" };
const [WIDE, HIGH, LEFT, TOP, BOTTOM] = [400, 110, 52, 8, 18];

class Chart {
  constructor(title) {
    this.title = title;
    this.points = new Map(); // by slot: [p50, p99, count]
    this.caption = make("figcaption");
    this.svg = make("svg:svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": title });
    this.figure = make("figure", { class: "chart" }, this.caption, this.svg);
  }

  forget() {
    this.points.clear();
  }

  take(points) {
    for (const [slot, median, worst, count] of points) this.points.set(slot, [median, worst, count]);
  }

  draw(now, numSlots) {
    for (const slot of this.points.keys()) if (slot <= now - numSlots) this.points.delete(slot);
    const slots = [...this.points.keys()].sort((a, b) => a - b);
    const newest = this.points.get(slots.at(-1));
    const told = newest
      ? `median ${duration(newest[0])}, 99 % within ${duration(newest[1])}`
      : "nothing in the last five minutes";
    this.caption.replaceChildren(make("span", {}, this.title), make("span", { class: "hint" }, told));
    this.svg.setAttribute("aria-label", `${this.title}: ${told}`);
    const top = niceTop(Math.max(0.001, ...slots.map((slot) => this.points.get(slot)[1])));
    const x = (slot) => LEFT + ((slot - now + numSlots) / numSlots) * (WIDE - LEFT - 4);
    const y = (value) => TOP + (1 - Math.min(1, value / top)) * (HIGH - TOP - BOTTOM);
    const parts = [0, 0.5, 1].flatMap((part) => [
      make("svg:line", { class: "grid", x1: LEFT, x2: WIDE - 4, y1: y(part * top), y2: y(part * top) }),
      make("svg:text", { x: LEFT - 6, y: y(part * top) + 4, "text-anchor": "end" }, part ? duration(part * top) : "0"),
    ]);
    const minutes = (numSlots * 5) / 60;
    parts.push(make("svg:text", { x: LEFT, y: HIGH - 3 }, `${minutes} min ago`));
    parts.push(make("svg:text", { x: WIDE - 4, y: HIGH - 3, "text-anchor": "end" }, "now"));
    for (const [which, name] of [[1, "worst"], [0, "median"]]) {
      for (const run of runsOf(slots)) {
        const places = run.map((slot) => [x(slot), y(this.points.get(slot)[which])]);
        if (places.length === 1) {
          parts.push(make("svg:circle", { class: `dot ${name}`, cx: places[0][0], cy: places[0][1], r: 2.5 }));
        } else {
          const text = places.map((place) => place.map((p) => p.toFixed(1)).join(",")).join(" ");
          parts.push(make("svg:polyline", { class: `curve ${name}`, points: text }));
        }
      }
    }
    this.svg.replaceChildren(...parts);
  }
}

/** The slots in runs without long gaps, across which no line is drawn. */
function runsOf(slots) {
  const runs = [];
  for (const slot of slots) {
    if (runs.length && slot - runs.at(-1).at(-1) <= 3) runs.at(-1).push(slot);
    else runs.push([slot]);
  }
  return runs;
}

/** The next number of the row 1, 2, 5, 10, ... */
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}
