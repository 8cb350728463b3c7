/** `npx vitest bench`: what a frame of the timeline costs without the raster. */
import { bench, describe } from "vitest";
import { draw } from "../../src/timeline/draw";
import { countAll } from "../../src/timeline/useShares";
import { bigStore, fakeContext, LOOKS, rangeIn, sceneOf } from "./scenes";

const store = bigStore();
const { ctx } = fakeContext();

describe("8 x 50,000 spans", () => {
  for (const share of LOOKS) {
    const scene = sceneOf(store, rangeIn(store, share));
    bench(`draw 1/${1 / share} of the run`, () => draw(ctx, scene), { time: 300 });
  }
  const lanes = store.lanes();
  bench("where the time goes", () => void countAll(store, lanes, rangeIn(store, 1)), { time: 300 });
});
