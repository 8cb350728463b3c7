import { useState } from "preact/hooks";
import { parseAnsi, plainOf } from "../ansi";
import type { Report } from "../protocol";
import { Button } from "./Button";
import { Shape } from "./shapes";
import { Text } from "./Text";

const SAID_MS = 1500;
/** IPython's arrow at the line that raised, with or without its number. */
const ARROW = /^\s*-{2,}>/;

/**
 * The cause of the failure: a summary, and the culprit's own lines, folded if the cell's error has
 * them.
 */
export function Failure({ report }: { report: Report }) {
  const [title = [], ...rest] = report.text
    .replace(/\n\s*\n/, "\n")
    .split("\n")
    .map(parseAnsi);
  const plain = [title, ...rest].map(plainOf);
  return (
    <section class="hm-failure" role="alert" aria-label="Failure">
      <div class="hm-failure-title">
        <Shape name="cross" />
        <span>
          <Text runs={title} />
        </span>
        <CopyButton text={plain.join("\n")} />
      </div>
      {rest.length > 0 && (
        <details open={!report.is_raised}>
          <summary>Traceback</summary>
          {/* biome-ignore lint/a11y/noNoninteractiveTabindex: what scrolls must be reached by keyboard */}
          <pre tabIndex={0}>
            {rest.map((runs, i) => (
              <div key={i} class={ARROW.test(plain[i + 1] ?? "") ? "hm-arrow" : undefined}>
                <Text runs={runs} />
                {"\n"}
              </div>
            ))}
          </pre>
        </details>
      )}
    </section>
  );
}

export function CopyButton({ text }: { text: string }) {
  const [said, setSaid] = useState("");
  const copy = async () => {
    setSaid((await toClipboard(text)) ? "Copied" : "Not allowed here");
    setTimeout(() => setSaid(""), SAID_MS);
  };
  return <Button act={() => void copy()}>{said || "Copy"}</Button>;
}

async function toClipboard(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // a page over plain http has no clipboard, and a frame may not have access to it
  }
}
