/** Columns of numbers: reading from messages, searching, and sorted growth. */

export type Column = Float64Array | Float32Array | Uint16Array | Uint8Array;

interface Kind<C extends Column> {
  new (length: number): C;
  readonly BYTES_PER_ELEMENT: number;
}

/** Reads columns from a message's buffer, one after the other. */
export class ColumnReader {
  private at = 0;

  constructor(
    private readonly view: DataView,
    private readonly what: string,
  ) {}

  /** The next `n` numbers, copied: data from a comm may not be aligned. */
  take<C extends Column>(kind: Kind<C>, n: number): C {
    const n_bytes = n * kind.BYTES_PER_ELEMENT;
    if (this.at + n_bytes > this.view.byteLength) {
      throw new RangeError(
        `${this.what}: the buffer holds ${this.view.byteLength} bytes, ${this.at + n_bytes} are needed`,
      );
    }
    const column = new kind(n);
    const bytes = new Uint8Array(column.buffer, 0, n_bytes);
    bytes.set(new Uint8Array(this.view.buffer, this.view.byteOffset + this.at, n_bytes));
    this.at += n_bytes;
    return column;
  }
}

export function readerOf(buffers: readonly DataView[], at: number, what: string): ColumnReader {
  const view = buffers[at];
  if (view === undefined) throw new RangeError(`${what}: there is no buffer ${at}`);
  return new ColumnReader(view, what);
}

/** The number at `i`, which the caller knows to be in range. */
export const num = (column: ArrayLike<number>, i: number): number => column[i] as number;

/** First index in the increasing `keys[0..n)` whose key is >= `key`; `n` if there is none. */
export const lowerBound = (keys: ArrayLike<number>, n: number, key: number): number =>
  countBefore(n, (i) => num(keys, i) < key);

/** First index in the increasing `keys[0..n)` whose key is > `key`; `n` if there is none. */
export const upperBound = (keys: ArrayLike<number>, n: number, key: number): number =>
  countBefore(n, (i) => num(keys, i) <= key);

/** Number of indices below `n` for which `isBefore` holds: all up to some index, and none after. */
function countBefore(n: number, isBefore: (i: number) => boolean): number {
  let [low, high] = [0, n];
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (isBefore(middle)) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** `column`, or a longer copy of it with room for `n` numbers. */
export function withRoom<C extends Column>(column: C, n: number): C {
  if (n <= column.length) return column;
  const longer = new (column.constructor as Kind<C>)(Math.max(n, column.length * 2, 64));
  longer.set(column as never);
  return longer;
}

/** Handling of a row whose key already exists. */
export type OnEqual = "replace" | "keep both";

/** Rows by column, sorted by the first column. New rows mostly belong at the end. */
export class Table<C extends readonly Column[]> {
  n = 0;

  constructor(public columns: C) {}

  get keys(): Column {
    return this.columns[0] as Column;
  }

  /** Inserts rows that are sorted themselves; returns the first index that changed. */
  insert(fresh: C, onEqual: OnEqual): number {
    const keys = fresh[0] as Column;
    const n_fresh = keys.length;
    if (n_fresh === 0) return this.n;
    this.columns = this.columns.map((c) => withRoom(c, this.n + n_fresh)) as unknown as C;
    const find = onEqual === "replace" ? lowerBound : upperBound;
    const from = find(this.keys, this.n, num(keys, 0));
    if (from === this.n) this.append(fresh, n_fresh);
    else this.merge(fresh, from, onEqual);
    return from;
  }

  /** Removes the first `n` rows. */
  dropFirst(n: number): void {
    for (const column of this.columns) column.copyWithin(0, n, this.n);
    this.n -= n;
  }

  private append(fresh: C, n_fresh: number): void {
    this.columns.forEach((column, k) => {
      column.set(fresh[k] as never, this.n);
    });
    this.n += n_fresh;
  }

  private merge(fresh: C, from: number, onEqual: OnEqual): void {
    const tail = this.columns.map((column) => column.slice(from, this.n));
    const picks = mergeOrder(tail[0] as Column, fresh[0] as Column, onEqual);
    this.columns.forEach((column, k) => {
      const [old, young] = [tail[k] as Column, fresh[k] as Column];
      picks.forEach((pick, i) => {
        column[from + i] = pick < 0 ? num(old, ~pick) : num(young, pick);
      });
    });
    this.n = from + picks.length;
  }
}

/** The merged order: an index of `fresh`, or the complement of an index of `old`. */
function mergeOrder(old: Column, fresh: Column, onEqual: OnEqual): Int32Array {
  const picks = new Int32Array(old.length + fresh.length);
  let n = 0;
  let i = 0;
  let k = 0;
  while (i < old.length || k < fresh.length) {
    const before = i < old.length ? num(old, i) : Number.POSITIVE_INFINITY;
    const next = k < fresh.length ? num(fresh, k) : Number.POSITIVE_INFINITY;
    const isEqual = i < old.length && k < fresh.length && before === next;
    if (isEqual && onEqual === "replace") i += 1;
    else if (i < old.length && before <= next) picks[n++] = ~i++;
    else picks[n++] = k++;
  }
  return picks.subarray(0, n);
}
