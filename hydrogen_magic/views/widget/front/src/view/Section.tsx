import type { ComponentChildren } from "preact";
import { useId, useState } from "preact/hooks";
import { isFolded, rememberFolded } from "../memory";

interface Props {
  /** Under which the reader's choice is remembered, in this browser. */
  name: string;
  title: string;
  /** Small words after the title: counts, hints. */
  note?: ComponentChildren;
  /** Buttons and selectors at the right; gone while the section is folded. */
  tools?: ComponentChildren;
  children: ComponentChildren;
}

/** A part of the page with a small caption that folds it. */
export function Section({ name, title, note, tools, children }: Props) {
  const [folded, setFolded] = useState(() => isFolded(name));
  const body = useId();
  const toggle = () => {
    rememberFolded(name, !folded);
    setFolded(!folded);
  };
  return (
    <section class={`hm-section hm-${name}`} aria-label={title}>
      <div class="hm-caption">
        <button
          type="button"
          class="hm-fold"
          aria-expanded={!folded}
          aria-controls={body}
          onClick={toggle}
        >
          <svg viewBox="0 0 8 8" aria-hidden="true">
            <path d="M1.5 2.5 4 5.5 6.5 2.5" />
          </svg>
          {title}
        </button>
        {note !== undefined && <span class="hm-note">{note}</span>}
        {!folded && tools !== undefined && <div class="hm-tools">{tools}</div>}
      </div>
      <div id={body} class="hm-body" hidden={folded}>
        {!folded && children}
      </div>
    </section>
  );
}
