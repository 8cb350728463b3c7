import { useLayoutEffect, useState } from "preact/hooks";

/** Longer than an available kernel takes to answer. */
const PATIENCE_MS = 4000;

const LATE =
  "No message from the kernel: it is busy with a cell, or has exited. The view appears when the kernel " +
  "responds; run the cell again if the kernel was restarted.";

/** Shown before the first message of the kernel. */
export function Waiting({ refusal }: { refusal: string }) {
  const [isLate, setLate] = useState(false);
  useLayoutEffect(() => {
    const timer = setTimeout(() => setLate(true), PATIENCE_MS);
    return () => clearTimeout(timer);
  }, []);
  return (
    <p class="hm-waiting" role="status">
      {refusal || (isLate ? LATE : "Starting…")}
    </p>
  );
}
