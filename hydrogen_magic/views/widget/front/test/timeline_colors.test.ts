import { describe, expect, it } from "vitest";
import { FILLS, inkOn, kindOf, N_KINDS, NameColors } from "../src/timeline/colors";

describe("colours", () => {
  it("are fixed for names that training has", () => {
    const kinds = [
      "data_wait",
      "forward",
      "loss.backward",
      "all_reduce",
      "optimizer",
      "checkpoint",
      "mine",
    ];
    expect(kinds.map(kindOf)).toEqual([0, 1, 2, 3, 4, 5, -1]);
  });

  it("tell a coordinator's negotiations from what they lead to", () => {
    const negotiating = ["negotiate allreduce", "negotiate broadcast", "waiting for rank 3"];
    const reducing = ["allreduce", "gloo allreduce", "hvd.synchronize", "mpi allreduce"];
    expect(negotiating.map(kindOf)).toEqual([6, 6, 6]);
    expect(reducing.map(kindOf)).toEqual([3, 3, 3, 3]);
  });

  it("of other names differ as long as there are any", () => {
    const colors = new NameColors();
    const n = FILLS.length - N_KINDS;
    const own = Array.from({ length: n }, (_, k) => colors.indexOf(`layer ${k}`));
    expect(new Set(own).size).toBe(n);
    expect(Math.min(...own)).toBe(N_KINDS);
    expect(colors.indexOf("layer 0")).toBe(own[0]);
  });

  it("of other names are those of the static picture", () => {
    const colors = new NameColors(); // tests/unit/test_static_svg.py has the same names
    const names = ["load", "augment", "réseau", "load 2", "a", "b", "c"];
    expect(names.map((name) => colors.indexOf(name))).toEqual([11, 7, 9, 10, 8, 9, 10]);
  });

  it("carry text that can be read", () => {
    expect([inkOn("#1b206a"), inkOn("#ecb913")]).toEqual(["#ffffff", "#000000"]);
  });

  it("differ for every kind of colour vision", () => {
    expect(leastDistance(FILLS)).toBeGreaterThan(28);
  });
});

/** Machado's matrices for full protanopia, deuteranopia and tritanopia, on linear light. */
const VISIONS = [
  [1, 0, 0, 0, 1, 0, 0, 0, 1],
  [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
  [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.01182, 0.04294, 0.968881],
  [1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.3039],
];
const XYZ = [0.4124, 0.3576, 0.1805, 0.2126, 0.7152, 0.0722, 0.0193, 0.1192, 0.9505];

const times = (m: readonly number[], v: readonly number[]) =>
  [0, 3, 6].map((r) => [0, 1, 2].reduce((sum, k) => sum + (m[r + k] ?? 0) * (v[k] ?? 0), 0));

function lab(fill: string, vision: readonly number[]): number[] {
  const linear = [1, 3, 5].map((i) => {
    const c = Number.parseInt(fill.slice(i, i + 2), 16) / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  const seen = times(vision, linear).map((c) => Math.min(1, Math.max(0, c)));
  const white = [0.9505, 1, 1.089];
  const [x = 0, y = 0, z = 0] = times(XYZ, seen).map((c, k) => {
    const t = c / (white[k] ?? 1);
    return t > 0.008856 ? Math.cbrt(t) : 7.787 * t + 16 / 116;
  });
  return [116 * y - 16, 500 * (x - y), 200 * (y - z)];
}

function leastDistance(fills: readonly string[]): number {
  let least = Number.POSITIVE_INFINITY;
  for (const vision of VISIONS) {
    const labs = fills.map((fill) => lab(fill, vision));
    labs.forEach((a, i) => {
      for (const b of labs.slice(i + 1))
        least = Math.min(least, Math.hypot(...a.map((c, k) => c - (b[k] ?? 0))));
    });
  }
  return least;
}
