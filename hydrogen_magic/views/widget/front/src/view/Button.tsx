import type { ComponentChildren } from "preact";

interface Props {
  act: () => void;
  /** Undefined for buttons without an on state. */
  isPressed?: boolean;
  isDisabled?: boolean;
  title?: string;
  /** Label for screen readers: `−` is "zoom out". */
  label?: string;
  children: ComponentChildren;
}

/** A button of a section's tools. */
export function Button({ act, isPressed, isDisabled, title, label, children }: Props) {
  return (
    <button
      type="button"
      class="hm-button"
      title={title}
      aria-label={label}
      aria-pressed={isPressed}
      disabled={isDisabled}
      onClick={act}
    >
      {children}
    </button>
  );
}
