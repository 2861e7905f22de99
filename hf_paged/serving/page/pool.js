// The block pool: what is known of each block, and its picture.

const KINDS = [
  ["free", "Free", "nobody holds it"],
  ["cached", "Cached", "free, and found again by prompts that begin alike"],
  ["held", "Held", "by one request"],
  ["shared", "Shared", "by several requests"],
];
const [FREE, CACHED, HELD, SHARED] = KINDS.keys();
const FEWEST_SHOWN = 512; // of a pool that has more

/** The blocks of one layer group, put together from what the server tells. */
class Blocks {
  constructor(count, blockSize) {
    this.count = count;
    this.blockSize = blockSize;
    this.marks = new Uint8Array(count); // 1: found by content
    this.owners = new Uint16Array(count);
    this.kinds = new Uint8Array(count);
    this.filled = new Float32Array(count); // tokens of the block that are computed, as a share
    this.totals = [count, 0, 0, 0];
    this.used = 0; // all blocks from here on have been free for as long as the page has looked
  }

  /** How many at least are worth a picture: those that have been used, and room for more, so that it seldom grows. */
  get worthShowing() {
    let shown = FEWEST_SHOWN;
    while (shown < this.used * 1.1) shown *= 2;
    return shown * 1.5 < this.count ? shown : this.count;
  }

  setMarks(base64) {
    const bytes = atob(base64);
    this.marks.fill(0);
    for (let block = 0; block < Math.min(this.count, bytes.length * 8); block += 1) {
      this.marks[block] = (bytes.charCodeAt(block >> 3) >> (7 - (block & 7))) & 1;
    }
  }

  /** Works out what each block is. `holders` has [blocks, tokens computed] of each request. */
  settle(holders) {
    this.owners.fill(0);
    this.filled.fill(0);
    for (const [blocks, computed] of holders) {
      for (let place = 0; place < blocks.length; place += 1) {
        const share = (computed - place * this.blockSize) / this.blockSize;
        this.owners[blocks[place]] += 1;
        if (share > this.filled[blocks[place]]) this.filled[blocks[place]] = Math.min(1, share);
      }
    }
    this.totals = [0, 0, 0, 0];
    for (let block = 0; block < this.count; block += 1) {
      const owners = this.owners[block];
      const kind = owners > 1 ? SHARED : owners ? HELD : this.marks[block] ? CACHED : FREE;
      this.kinds[block] = kind;
      this.totals[kind] += 1;
      if (kind !== FREE && block >= this.used) this.used = block + 1;
    }
  }
}

/** A canvas with a square for each block that is shown. The pointer or the arrow keys choose one, which is then described. */
class PoolPicture {
  constructor(blocks, label, onChoice) {
    this.blocks = blocks;
    this.chosen = -1;
    this.marked = new Set(); // blocks to point out
    this.canvas = make("canvas", {
      class: "pool",
      tabindex: 0,
      role: "application",
      "aria-roledescription": "block pool",
      "aria-label": `${label}. Arrow keys go from block to block.`,
      "aria-describedby": "block-info",
      pointermove: (event) => this.choose(this.under(event), onChoice),
      pointerleave: () => this.choose(document.activeElement === this.canvas ? this.cursor : -1, onChoice),
      pointerdown: (event) => this.choose((this.cursor = this.under(event)), onChoice),
      focus: () => this.choose((this.cursor = Math.max(0, this.cursor)), onChoice),
      blur: () => this.choose(-1, onChoice),
      keydown: (event) => this.move(event, onChoice),
    });
    this.more = make("p", { class: "hint" });
    this.cursor = -1;
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
  }

  remove() {
    this.observer.disconnect();
    this.canvas.remove();
  }

  /**
   * Finds the largest squares with which all blocks fit. They can be told apart and pointed at, if need be by scrolling;
   * only very many are smaller, as no canvas is high enough. A step is whole dots of the screen, so all look alike.
   */
  measure() {
    const scale = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth;
    const { count, worthShowing } = this.blocks;
    for (let size = 18; ; size -= 1) {
      const step = Math.max(1, Math.round(size * scale)) / scale;
      const columns = Math.max(1, Math.floor(width / step));
      const rows = Math.ceil(worthShowing / columns);
      const [height, shown] = [rows * step, Math.min(count, rows * columns)];
      if (height <= (size > 8 ? 300 : 6000) || size === 2) return { width, step, columns, height, shown, scale };
    }
  }

  draw() {
    if (!this.canvas.clientWidth) return;
    const { width, step, columns, height, shown, scale } = (this.grid = this.measure());
    const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      this.canvas.width = wide;
      this.canvas.height = high;
      this.canvas.style.height = `${height}px`;
    }
    Object.assign(this.canvas.dataset, { columns, step });
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const style = getComputedStyle(this.canvas);
    const colours = KINDS.map(([name]) => style.getPropertyValue(`--${name}`));
    const pale = KINDS.map(([name]) => style.getPropertyValue(`--${name}-pale`));
    const gap = step > 8 ? 2 : step > 3 ? 1 : 0;
    const side = Math.floor(step) - gap;
    const { kinds, filled, count } = this.blocks;
    const hidden = count - shown;
    say(this.more, hidden ? `… and ${counted(hidden, "more free block", "more free blocks")}` : "");
    for (let block = 0; block < shown; block += 1) {
      const [x, y] = this.place(block);
      const kind = kinds[block];
      const level = kind >= HELD && side > 3 ? Math.round(side * filled[block]) : side;
      if (level < side) {
        context.fillStyle = pale[kind];
        context.fillRect(x, y, side, side - level);
      }
      context.fillStyle = colours[kind];
      context.fillRect(x, y + side - level, side, level);
    }
    context.fillStyle = context.strokeStyle = style.getPropertyValue("--ink");
    for (const block of this.marked) this.outline(context, block, side, 1);
    if (this.chosen >= 0 && this.chosen < shown) this.outline(context, this.chosen, side, 2);
  }

  place(block) {
    const { step, columns } = this.grid;
    return [(block % columns) * step, Math.floor(block / columns) * step];
  }

  outline(context, block, side, line) {
    const [x, y] = this.place(block);
    if (side < 5 && line === 1) return context.fillRect(x, y, side, side);
    context.lineWidth = line;
    context.strokeRect(x - line / 2 + 0.5, y - line / 2 + 0.5, side + line - 1, side + line - 1);
  }

  under(event) {
    if (!this.grid) return -1;
    const box = this.canvas.getBoundingClientRect();
    const [column, row] = [event.clientX - box.left, event.clientY - box.top].map((p) => Math.floor(p / this.grid.step));
    const block = row * this.grid.columns + column;
    return column >= 0 && column < this.grid.columns && row >= 0 && block < this.grid.shown ? block : -1;
  }

  move(event, onChoice) {
    const { columns, shown } = this.grid;
    const last = shown - 1;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -last, End: last };
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.cursor = Math.min(last, Math.max(0, this.cursor + steps[event.key]));
    this.choose(this.cursor, onChoice);
  }

  choose(block, onChoice) {
    if (block === this.chosen) return;
    this.chosen = block;
    onChoice(this, block);
  }
}
