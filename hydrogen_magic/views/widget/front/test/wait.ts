import { vi } from "vitest";

/** Waits until `check` passes; long enough for a machine that is busy with other tests. */
export const eventually = (check: () => void) => vi.waitFor(check, { timeout: 30_000 });
