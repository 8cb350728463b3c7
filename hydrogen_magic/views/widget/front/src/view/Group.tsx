import type { ComponentChildren } from "preact";

interface Props {
  label: string;
  class: string;
  children: ComponentChildren;
}

/** Buttons that belong together, with a label for screen readers. */
export function Group({ label, class: style, children }: Props) {
  return (
    // biome-ignore lint/a11y/useSemanticElements: a fieldset is for forms
    <div class={style} role="group" aria-label={label}>
      {children}
    </div>
  );
}
