import type { Delta, Line, Rank, RankSummary, Sent } from "../../src/protocol";
import { gangWith, lineOf, packed, rankWith } from "../kernel";
import { hostileLines, report, stacks } from "./texts";
import { Training } from "./training";

export interface Sending {
  content: Omit<Delta, "kind" | "seq">;
  buffers: ArrayBuffer[];
}

/** One state of a gang to look at. */
export interface Scene {
  whole: () => Sending;
  /** What came in the last 100 ms. */
  tick?: () => Sending | null;
  react?: (command: Sent) => Sending | null;
}

function running(): Scene {
  const training = new Training(4, 46);
  return {
    whole: () => training.whole({ remaining_s: 131, steps_per_s: 23.4 }),
    tick: () => training.next(0.1),
    react: (command) => {
      if (command.do === "stop") return training.say({ state: "stopping", stop_reason: "user" });
      if (command.do === "record") return training.say({ recording: command.on });
      if (command.do === "profile") return training.say({ profiling: "recording" });
      return command.do === "stacks" ? training.tell({ stacks: stacks() }) : null;
    },
  };
}

function failed(): Scene {
  const training = new Training(4, 46);
  const gang = { state: "failed" as const, culprit: 2, ended_s: 46.4, reason: "rank 2 failed" };
  return {
    whole: () => {
      const { content, buffers } = training.whole(gang);
      const ranks = (content.ranks ?? []).map((row): Rank => {
        if (row.rank !== 2) return { ...row, phase: "stopped", doing: "stopped", mark: "" };
        return { ...row, phase: "failed", doing: "failed: ValueError", mark: "dead" };
      });
      return { content: { ...content, ranks, report }, buffers };
    },
  };
}

function stopped(): Scene {
  const training = new Training(4, 46);
  const gang = { state: "stopped" as const, ended_s: 46.6, reason: "stopped by you" };
  return {
    whole: () => {
      const { content, buffers } = training.whole(gang);
      const ranks = (content.ranks ?? []).map(
        (row): Rank => ({ ...row, phase: "stopped", doing: "stopped", mark: "" }),
      );
      return { content: { ...content, ranks }, buffers };
    },
  };
}

function starting(): Scene {
  const doing = ["importing torch", "importing torch", "starting Python", "importing torch"];
  const ranks = doing.map((words, k) => rankWith(k, { phase: "starting", doing: words }));
  let now_s = 0.4;
  const gang = gangWith({ state: "starting" });
  return {
    whole: () => ({ content: { full: true, now_s, gang, ranks }, buffers: [] }),
    tick: () => {
      now_s += 0.1;
      return { content: { now_s }, buffers: [] };
    },
  };
}

function many(): Scene {
  const np = 1024;
  const phases = ["waiting", "starting", "running", "done", "failed"];
  const progress = Float32Array.from({ length: np }, (_, k) => 58 + 9 * Math.sin(k / 60));
  progress[337] = 12;
  const phase = new Uint8Array(np).fill(2);
  phase[801] = 4;
  const mark = new Uint8Array(np);
  mark[337] = 1;
  mark[801] = 3;
  mark[12] = 2;
  let asked: number[] = [];
  let now_s = 312;
  const row = (rank: number): Rank =>
    rankWith(rank, {
      host: `node-${String(Math.floor(rank / 8)).padStart(3, "0")}`,
      device: `cuda:${rank % 8}`,
      bar: {
        desc: "epoch 2",
        n: Math.round(progress[rank] ?? 0) * 40,
        total: 4000,
        unit: "it",
        per_s: 8,
      },
      steps_per_s: rank === 337 ? 1.7 : 8.1,
      metrics: { loss: 1.9 + (rank % 7) / 50 },
      rss_bytes: 5.1e9 + rank * 1e6,
      gpu_percent: rank === 337 ? 21 : 97,
      gpu_memory_bytes: 71e9,
      doing: rank === 801 ? "killed by SIGKILL" : rank === 337 ? "data wait" : "backward",
      phase: phases[phase[rank] ?? 0] ?? "",
      mark: (["", "straggler", "stopped", "dead"] as const)[mark[rank] ?? 0] ?? "",
    });
  const sending = (full: boolean): Sending => {
    const shown = [...new Set([801, 337, 12, 13, ...asked])];
    const bytes = Uint8Array.from(progress, (value) => Math.min(100, value));
    const view: RankSummary = { counts: { running: 1023, failed: 1 }, phases, shown, at: 0 };
    const gang = gangWith({ np, placement: "spark", steps_per_s: 8.1, remaining_s: 804 });
    const warnings = ["rank 337 is 4.8 times slower than the median"];
    const content = {
      full,
      now_s,
      gang: { ...gang, warnings },
      summary: view,
      ranks: shown.map(row),
    };
    return { content, buffers: [packed(phase, bytes, mark)] };
  };
  return {
    whole: () => sending(true),
    tick: () => {
      now_s += 0.1;
      progress.forEach((value, k) => {
        if (phase[k] === 2) progress[k] = value + Math.random() * 0.1;
      });
      return sending(false);
    },
    react: (command) => {
      if (command.do !== "rows") return null;
      asked = command.ranks;
      return sending(false);
    },
  };
}

function hostile(): Scene {
  const gang = gangWith({
    id: "<b>amber</b>",
    title: '"><script>alert(1)</script>',
    warnings: ["<img src=x onerror=alert(1)>"],
    steps_per_s: 1,
  });
  const ranks = [
    rankWith(0, {
      doing: "<i>backward</i>",
      device: "</td></tr></table>",
      bar: { desc: "<u>", n: 1, total: 3, unit: "", per_s: null },
      metrics: { "<script>": 1, loss: "nan" },
    }),
  ];
  const lines: Line[] = hostileLines.map((text, k) => lineOf(k % 4, text, k % 3 === 1 ? 1 : 0));
  const content = {
    full: true,
    now_s: 4,
    gang,
    ranks,
    lines,
    report: { rank: 0, is_raised: false, text: hostileLines.join("\n") },
  };
  return { whole: () => ({ content, buffers: [] }) };
}

export const scenes = { running, failed, stopped, starting, many, hostile } as Record<
  string,
  () => Scene
> & { running: () => Scene };
