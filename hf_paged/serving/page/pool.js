// The block pool: what is known of each block, and its picture.

const KINDS = [
  ["free", "Free", "nobody holds it"],
  ["cached", "Cached", "free, and found again by prompts that begin alike"],
  ["held", "Held", "by one request"],
  ["shared", "Shared", "by several requests"],
];
const [FREE, CACHED, HELD, SHARED] = KINDS.keys();

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
    }
  }
}

/** A canvas with a square for each block. The pointer or the arrow keys choose one, which is then described. */
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
    this.cursor = -1;
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
  }

  remove() {
    this.observer.disconnect();
    this.canvas.remove();
  }

  /** Finds the largest squares with which all blocks fit; at least two points wide, whatever height that takes. */
  measure() {
    const width = this.canvas.clientWidth;
    const highest = 300;
    let least = 18;
    while (least > 2 && Math.ceil(this.blocks.count / Math.floor(width / least)) * least > highest) least -= 1;
    const columns = Math.max(1, Math.floor(width / least));
    const step = width / columns; // they fill the width
    return { width, step, columns, height: Math.ceil(Math.ceil(this.blocks.count / columns) * step) };
  }

  draw() {
    if (!this.canvas.clientWidth) return;
    const { width, step, columns, height } = (this.grid = this.measure());
    const scale = window.devicePixelRatio || 1;
    const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      this.canvas.width = wide;
      this.canvas.height = high;
      this.canvas.style.height = `${height}px`;
      this.canvas.dataset.columns = columns;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const style = getComputedStyle(this.canvas);
    const colours = KINDS.map(([name]) => style.getPropertyValue(`--${name}`));
    const pale = KINDS.map(([name]) => style.getPropertyValue(`--${name}-pale`));
    const gap = step > 8 ? 2 : step > 3 ? 1 : 0;
    const side = Math.floor(step) - gap;
    const { kinds, filled, count } = this.blocks;
    for (let block = 0; block < count; block += 1) {
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
    if (this.chosen >= 0 && this.chosen < count) this.outline(context, this.chosen, side, 2);
  }

  place(block) {
    const { step, columns } = this.grid;
    return [Math.round((block % columns) * step), Math.round(Math.floor(block / columns) * step)];
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
    return column >= 0 && column < this.grid.columns && row >= 0 && block < this.blocks.count ? block : -1;
  }

  move(event, onChoice) {
    const { columns } = this.grid ?? { columns: 1 };
    const last = this.blocks.count - 1;
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
