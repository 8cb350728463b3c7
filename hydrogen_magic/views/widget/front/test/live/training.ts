import type { CurveDelta, Gang, Line, Rank, SpanDelta } from "../../src/protocol";
import { ALL_RANKS } from "../../src/protocol";
import { gangWith, lineOf, packed, rankWith } from "../kernel";
import type { Sending } from "./scenes";

const STEPS = 4000;
const STEP_S = 0.043;
const NAMES = ["data wait", "forward", "backward", "all_reduce", "optimizer", "importing torch"];
const SHARES = [0.09, 0.27, 0.44, 0.13, 0.07];

/** Ranks that train: rank 2 is slower than the others, loss falls, spans fill the time. */
export class Training {
  private step = 0;
  private seed = 7;

  constructor(
    private readonly np: number,
    private now_s: number,
  ) {}

  whole(gang: Partial<Gang>): Sending {
    const until = Math.floor((this.now_s - 2) / STEP_S);
    const sending = this.steps(until);
    const starts = Array.from({ length: this.np }, (_, rank) => this.importing(rank));
    const spans = [...starts.map(({ delta }, k) => ({ ...delta, at: sending.buffers.length + k }))];
    const { content } = sending;
    return {
      content: {
        ...content,
        full: true,
        gang: gangWith({ ...gang, warnings: [] }),
        names: NAMES,
        spans: [...(content.spans ?? []), ...spans],
      },
      buffers: [...sending.buffers, ...starts.map(({ buffer }) => buffer)],
    };
  }

  next(passed_s: number): Sending {
    this.now_s += passed_s;
    return this.steps(Math.floor((this.now_s - 2) / STEP_S));
  }

  say(gang: Partial<Gang>): Sending {
    return this.tell({ gang: gangWith(gang) });
  }

  tell(content: Partial<Sending["content"]>): Sending {
    return { content: { now_s: this.now_s, ...content }, buffers: [] };
  }

  /** Everything of the steps from the last told one to `until`. */
  private steps(until: number): Sending {
    const from = this.step;
    this.step = Math.max(from, until);
    const buffers: ArrayBuffer[] = [];
    const curves = ["loss", "accuracy", "grad_norm", "lr"].map((metric) =>
      this.curve(metric, from, buffers),
    );
    const spans = Array.from({ length: this.np }, (_, rank) => this.spans(rank, from, buffers));
    const ranks = Array.from({ length: this.np }, (_, rank) => this.row(rank));
    const content = { now_s: this.now_s, ranks, curves, spans, lines: this.lines(from) };
    return { content, buffers };
  }

  private random(): number {
    this.seed = (this.seed * 16807) % 2147483647;
    return this.seed / 2147483647;
  }

  private value(metric: string, step: number, rank: number): number {
    const noise = this.random() - 0.5 + rank * 0.08;
    const falling = Math.exp(-step / 420);
    if (metric === "loss") return 0.42 + 1.9 * falling + 0.13 * noise * (0.4 + falling);
    if (metric === "accuracy") return 0.94 - 0.78 * falling + 0.03 * noise;
    if (metric === "grad_norm") return 1.1 + 2.4 * falling + 0.7 * noise * noise + 0.2 * noise;
    return 3e-4 * Math.min(1, step / 120) * (0.5 + 0.5 * Math.cos((Math.PI * step) / STEPS));
  }

  private curve(metric: string, from: number, buffers: ArrayBuffer[]): CurveDelta {
    const ranks = Array.from({ length: this.np }, (_, rank) => rank);
    const n = this.step - from;
    const keys = Float64Array.from({ length: n }, (_, k) => from + k);
    const values = ranks.map((rank) =>
      Float32Array.from(keys, (step) => this.value(metric, step, rank)),
    );
    const over = (pick: (...all: number[]) => number) =>
      Float32Array.from(keys, (_, k) => pick(...values.map((column) => column[k] ?? 0)));
    const mean = over((...all) => all.reduce((a, b) => a + b) / all.length);
    const ones = new Float32Array(n).fill(1);
    const columns = values.flatMap((column) => [keys, ones, column, column, column]);
    const all = [keys, new Float32Array(n).fill(this.np), mean, over(Math.min), over(Math.max)];
    buffers.push(packed(...columns, ...all));
    const series = [...ranks, ALL_RANKS].map((rank) => ({ rank, n }));
    return { metric, width: 1, series, at: buffers.length - 1 };
  }

  private spans(rank: number, from: number, buffers: ArrayBuffer[]): SpanDelta {
    const [starts, durations, names]: [number[], number[], number[]] = [[], [], []];
    for (let step = from; step < this.step; step++) {
      let at = 2 + step * STEP_S;
      const slow = rank === 2 ? 2.4 : 1;
      SHARES.forEach((share, name) => {
        const stretch = name === 0 ? slow : name === 3 ? 2 - slow * 0.7 : 1;
        const length = STEP_S * share * Math.max(0.1, stretch) * (0.9 + 0.15 * this.random());
        starts.push(at);
        durations.push(length * 0.97);
        names.push(name);
        at += length;
      });
    }
    const n = starts.length;
    buffers.push(spanBuffer(starts, durations, names));
    return { rank, track: "spans", n, skipped: 0, at: buffers.length - 1 };
  }

  private importing(rank: number): { delta: SpanDelta; buffer: ArrayBuffer } {
    const buffer = spanBuffer([0.1], [1.8 + rank * 0.02], [NAMES.length - 1]);
    return { delta: { rank, track: "phases", n: 1, skipped: 0, at: 0 }, buffer };
  }

  private row(rank: number): Rank {
    const n = Math.min(STEPS, this.step - rank - (rank === 2 ? 31 : 0));
    const doing = ["backward", "forward", "data wait", "all_reduce"][rank % 4] ?? "";
    return rankWith(rank, {
      device: `cuda:${rank}`,
      bar: { desc: "epoch 3", n: Math.max(0, n), total: STEPS, unit: "it", per_s: 23 },
      steps: Math.max(0, n),
      steps_per_s: rank === 2 ? 22.1 : 23.4,
      metrics: {
        loss: this.value("loss", n, rank),
        accuracy: this.value("accuracy", n, rank),
        grad_norm: this.value("grad_norm", n, rank),
        lr: this.value("lr", n, rank),
      },
      rss_bytes: 2.31e9 + rank * 11e6,
      gpu_percent: 91 - rank * 3,
      gpu_memory_bytes: 18.4e9 + rank * 1e8,
      doing,
      mark: rank === 2 ? "straggler" : "",
    });
  }

  private lines(from: number): Line[] {
    const lines: Line[] = [];
    for (let step = Math.ceil(from / 25) * 25; step < this.step; step += 25) {
      for (let rank = 0; rank < this.np; rank++) {
        const loss = this.value("loss", step, rank).toFixed(4);
        const line = lineOf(
          rank,
          `step \x1b[36m${step}\x1b[0m/${STEPS} loss=\x1b[1m${loss}\x1b[0m`,
        );
        lines.push([line[0], line[1], line[2], 2 + step * STEP_S]);
      }
      if (step % 400 === 300)
        lines.push(lineOf(2, "\x1b[33mWARNING\x1b[0m loader: slow read of shard 17, 84 ms", 1));
    }
    return lines;
  }
}

function spanBuffer(starts: number[], durations: number[], names: number[]): ArrayBuffer {
  return packed(
    Float64Array.from(starts),
    Float32Array.from(durations),
    Uint16Array.from(names),
    new Uint8Array(starts.length),
  );
}
