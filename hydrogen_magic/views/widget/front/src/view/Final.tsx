import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { fromBase64 } from "../format";
import { safeFragment } from "../safe";

/** Longer than a kernel that can hear us takes to answer. */
const PATIENCE_MS = 4000;

const LATE =
  "No word from the kernel: it is busy with a cell, or gone. The view comes as soon as the kernel " +
  "answers; run the cell again if the kernel was restarted.";

/**
 * The finished picture, for a page that no kernel has told anything: a notebook that was saved with
 * its widgets, or a kernel that was restarted. As soon as a kernel answers, the live view takes its
 * place, so nobody has to find out beforehand whether there is one. The red broken link that is over
 * it meanwhile is the notebook's own (`.jupyter-widgets-disconnected::before`): it puts one at every
 * widget without a kernel, and the reader may as well know.
 */
export function Final({ html }: { html: string }) {
  const box = useRef<HTMLDivElement>(null);
  const picture = useMemo(() => safeFragment(fromBase64(html)), [html]);
  useLayoutEffect(() => box.current?.replaceChildren(picture.cloneNode(true)), [picture]);
  return <div class="hm-final" ref={box} />;
}

/** Before the first word of the kernel. */
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
