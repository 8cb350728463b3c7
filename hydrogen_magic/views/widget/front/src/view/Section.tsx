import type { ComponentChildren } from "preact";
import { useId, useState } from "preact/hooks";
import { foldedBefore, rememberFolded } from "../memory";

interface Props {
  /** Key of the user's choice, which is saved in this browser. */
  name: string;
  title: string;
  /** Small text after the title: counts, hints. */
  note?: ComponentChildren;
  /** Buttons and selectors at the right; hidden while the section is folded. */
  tools?: ComponentChildren;
  /** Whether it is folded by default. */
  isFoldedAtFirst?: boolean;
  children: ComponentChildren;
}

/** Whether a part is folded, as last chosen by the user, and a function that changes it. */
export function useFolded(name: string, atFirst: boolean): [boolean, () => void] {
  const [chosen, choose] = useState(() => foldedBefore(name));
  const folded = chosen ?? atFirst;
  const toggle = () => {
    rememberFolded(name, !folded);
    choose(!folded);
  };
  return [folded, toggle];
}

interface FoldProps {
  title: string;
  folded: boolean;
  toggle: () => void;
  /** Id of the element that it folds. */
  body: string;
}

export function FoldButton({ title, folded, toggle, body }: FoldProps) {
  return (
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
  );
}

/** A part of the page with a small caption that folds it. */
export function Section({ name, title, note, tools, isFoldedAtFirst = false, children }: Props) {
  const [folded, toggle] = useFolded(name, isFoldedAtFirst);
  const body = useId();
  return (
    <section class={`hm-section hm-${name}`} aria-label={title}>
      <div class="hm-caption">
        <FoldButton {...{ title, folded, toggle, body }} />
        {note !== undefined && <span class="hm-note">{note}</span>}
        {!folded && tools !== undefined && <div class="hm-tools">{tools}</div>}
      </div>
      <div id={body} class="hm-body" hidden={folded}>
        {!folded && children}
      </div>
    </section>
  );
}
