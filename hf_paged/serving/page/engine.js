// The engine view: follows /engine/events, and shows what they tell.

const MOST_ROWS = 60;

const engine = {
  about: null,
  figures: {},
  requests: new Map(), // by id: an object of the fields that `about` names
  tables: new Map(), // by id: for each layer group the blocks
  pools: [], // for each layer group {blocks, picture}
  pointed: null, // the id of the request whose row is under the pointer or has the focus
  rows: new Map(),
  charts: {},
  speed: null,

  build() {
    $("legend").append(...KINDS.map(([name, label, meaning], kind) =>
      make("li", { title: meaning }, make("span", { class: `swatch ${name}` }), `${label} `, make("b", { id: `total-${kind}` }, "–")),
    ));
    for (const [kind, title] of Object.entries(CHARTS)) {
      this.charts[kind] = new Chart(title);
      $("charts").append(this.charts[kind].figure);
    }
    const keys = [["median", "median"], ["worst", "99 % are faster"]];
    $("charts").append(make("p", { class: "legend" }, ...keys.map(([name, label]) =>
      make("span", {}, make("span", { class: `swatch line ${name}` }), label))));
    for (const [name, label] of FIGURES) {
      $("figures").append(make("div", {}, make("dt", {}, label), make("dd", { id: `figure-${name}` }, "–")));
    }
    new MutationObserver(() => this.redraw()).observe(document.documentElement, { attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  },

  /** Takes in one event of the server; `difference` in engine_view.py says what is in it. */
  take(told) {
    if (told.about) this.begin(told.about);
    this.figures = told.figures;
    told.marks?.forEach((mark, group) => mark !== null && this.pools[group].blocks.setMarks(mark));
    for (const name of told.gone ?? []) {
      this.requests.delete(name);
      this.tables.delete(name);
    }
    for (const name of told.freed ?? []) this.tables.delete(name);
    for (const [name, numbers] of Object.entries(told.requests ?? {})) {
      const fields = this.about.request_fields.map((field, index) => [field, numbers[index]]);
      this.requests.set(name, Object.fromEntries(fields));
    }
    for (const [name, [place, added]] of Object.entries(told.tables ?? {})) {
      const table = this.tables.get(name) ?? added.map(() => []);
      this.tables.set(name, table.map((blocks, group) => blocks.slice(0, place).concat(added[group])));
    }
    for (const [kind, points] of Object.entries(told.latencies ?? {})) this.charts[kind].take(points);
    this.pools.forEach(({ blocks }, group) => blocks.settle(this.holders(group)));
    this.show();
  },

  /** All starts anew: another server, or another pool. */
  begin(about) {
    this.about = about;
    this.requests.clear();
    this.tables.clear();
    this.speed = null;
    for (const chart of Object.values(this.charts)) chart.forget();
    for (const { picture } of this.pools) picture.remove();
    $("pools").replaceChildren();
    const several = about.num_blocks.length > 1;
    this.pools = about.num_blocks.map((count, group) => {
      const blocks = new Blocks(count, about.block_size);
      const label = several ? `Layer group ${group + 1} of ${about.num_blocks.length}` : "Block pool";
      const picture = new PoolPicture(blocks, `${label}, ${count} blocks`, (_, block) => this.chooseBlock(group, block));
      $("pools").append(...(several ? [make("h4", {}, label)] : []), make("div", { class: "pool-box" }, picture.canvas), picture.more);
      return { blocks, picture };
    });
    say($("engine-about"), `${about.device}, ${about.backend} attention, ${about.block_size} tokens a block`);
  },

  holders(group) {
    return [...this.tables].map(([name, table]) => [table[group], this.requests.get(name)?.computed ?? 0]);
  },

  redraw() {
    for (const { picture } of this.pools) picture.draw();
  },

  show() {
    const { figures, pools } = this;
    const totals = KINDS.map((_, kind) => pools.reduce((sum, { blocks }) => sum + blocks.totals[kind], 0));
    totals.forEach((total, kind) => say($(`total-${kind}`), total.toLocaleString("en")));
    const all = totals.reduce((sum, total) => sum + total, 0);
    for (const [name, , text] of FIGURES) say($(`figure-${name}`), text(this, figures, totals, all));
    const stalled = figures.step_seconds >= 10; // a long prompt on a busy processor takes seconds
    const problem = {
      draining: "The server is shutting down: what runs may end, and nothing new begins.",
      asleep: "The engine sleeps: it takes requests again when it is woken up.",
    }[figures.state] ?? (stalled ? `The step under way has taken ${Math.round(figures.step_seconds)} s so far.` : "");
    say($("engine-problem"), problem);
    $("engine-problem").hidden = !problem;
    this.showRequests();
    for (const { picture } of pools) this.mark(picture);
    for (const chart of Object.values(this.charts)) chart.draw(figures.slot, this.about.latency_slots);
  },

  /** Tokens of all answers a second, over the last two seconds or so. */
  tokensPerSecond() {
    const { now, generated, running, waiting } = this.figures;
    const past = (this.speed ??= [[now, generated]]);
    if (past.at(-1)[0] !== now) past.push([now, generated]);
    while (past.length > 2 && now - past[1][0] >= 2) past.shift();
    const [then, before] = past[0];
    return now > then && running + waiting ? Math.max(0, (generated - before) / (now - then)) : 0;
  },

  // ---------------------------------------------------------------- requests

  showRequests() {
    const shown = [...this.requests].slice(0, MOST_ROWS);
    const names = new Set(shown.map(([name]) => name));
    for (const [name, row] of this.rows) {
      if (!names.has(name)) {
        row.item.remove();
        this.rows.delete(name);
        if (this.pointed === name) this.pointed = null;
      }
    }
    for (const [name, request] of shown) {
      if (!this.rows.has(name)) this.rows.set(name, this.makeRow(name));
      this.showRow(this.rows.get(name), name, request);
    }
    const total = this.figures.running + this.figures.waiting;
    const hidden = Math.max(0, total - shown.length);
    say($("requests-more"), hidden ? `and ${counted(hidden, "more request", "more requests")}` : total ? "" : "None now.");
    $("requests").hidden = !shown.length;
  },

  makeRow(name) {
    const row = { status: make("span", { class: "status" }), numbers: make("span", { class: "numbers" }) };
    row.prompt = make("span", { class: "part prompt" }, make("i"));
    row.answer = make("span", { class: "part answer" }, make("i"));
    const point = (to) => () => this.point(to);
    row.item = make(
      "li",
      { pointerenter: point(name), pointerleave: point(null) },
      make("span", { class: "row" }, make("code", { title: name }, name), row.status),
      make("span", { class: "bar", "aria-hidden": "true" }, row.prompt, row.answer),
      row.numbers,
    );
    $("requests").append(row.item);
    return row;
  },

  showRow(row, name, request) {
    const { prompt, computed, generated, limit, cached, preemptions } = request;
    const ofPrompt = Math.min(prompt, computed);
    const mine = chat.requestId && name.startsWith(`${chat.requestId}-`);
    say(row.status, (mine ? "this page’s, " : "") + request.status);
    row.item.dataset.status = request.status;
    const parts = [`prompt ${ofPrompt}/${prompt}`, `answer ${generated}/${limit}`];
    if (cached) parts.push(`${cached} cached`);
    if (preemptions) parts.push(`preempted ${counted(preemptions, "time", "times")}`);
    if (request.status !== "running") parts.push(`for ${duration(Math.max(0, this.figures.now - request.arrived))}`);
    say(row.numbers, parts.join(" · "));
    row.prompt.style.flexGrow = prompt;
    row.answer.style.flexGrow = limit;
    row.prompt.firstChild.style.width = `${(100 * ofPrompt) / prompt}%`;
    row.answer.firstChild.style.width = `${(100 * generated) / limit}%`;
  },

  // ---------------------------------------------------------------- blocks

  point(name) {
    this.pointed = name;
    for (const { picture } of this.pools) this.mark(picture);
  },

  chooseBlock(group, block) {
    for (const [name, row] of this.rows) {
      row.item.classList.toggle("chosen", block >= 0 && this.ownersOf(group, block).some((owner) => owner.name === name));
    }
    this.mark(this.pools[group].picture);
  },

  /** Points out the blocks of the request that is pointed at, or of those that hold the chosen block. */
  mark(picture) {
    const group = this.pools.findIndex((pool) => pool.picture === picture);
    const { chosen } = picture;
    const names = chosen >= 0 ? this.ownersOf(group, chosen).map(({ name }) => name) : [this.pointed];
    picture.marked = new Set(names.flatMap((name) => this.tables.get(name)?.[group] ?? []));
    picture.draw();
    this.describe();
  },

  ownersOf(group, block) {
    const owners = [];
    for (const [name, table] of this.tables) {
      const place = table[group].indexOf(block);
      if (place >= 0) owners.push({ name, place });
    }
    return owners;
  },

  /** Says of the chosen block whose it is, and how full. */
  describe() {
    const group = this.pools.findIndex(({ picture }) => picture.chosen >= 0);
    if (group < 0) {
      say($("block-info"), "Point at a block, or choose one with the arrow keys, to see whose it is.");
      return;
    }
    const { blocks, picture } = this.pools[group];
    const block = picture.chosen;
    const owners = this.ownersOf(group, block);
    const slots = Math.round(blocks.filled[block] * blocks.blockSize);
    const full = `${slots} of ${blocks.blockSize} slots filled`;
    let told = `Block ${block}: ${KINDS[blocks.kinds[block]][0]}`;
    if (owners.length === 1) {
      const first = owners[0].place * blocks.blockSize;
      told += ` by ${owners[0].name}, its tokens from ${first} on, ${full}`;
    } else if (owners.length) {
      const some = owners.slice(0, 3).map(({ name }) => name).join(", ");
      told += ` by ${counted(owners.length, "request", "requests")} (${some}${owners.length > 3 ? ", …" : ""}), ${full}`;
    } else {
      told += `, ${KINDS[blocks.kinds[block]][2]}`;
    }
    say($("block-info"), told + ".");
  },
};

const FIGURES = [
  ["running", "Running", (_, { running }) => running.toLocaleString("en")],
  ["waiting", "Waiting", (_, { waiting }) => waiting.toLocaleString("en")],
  ["speed", "Tokens a second", (view) => view.tokensPerSecond().toFixed(1)],
  ["held", "Blocks in use", (_1, _2, totals, all) => share(totals[HELD] + totals[SHARED], all)],
  ["hits", "Prompt tokens cached", (_, { prefix_hits: hits, prefix_queries: all }) => share(hits, all)],
  ["preemptions", "Preemptions", (_, { preemptions }) => preemptions.toLocaleString("en")],
];
