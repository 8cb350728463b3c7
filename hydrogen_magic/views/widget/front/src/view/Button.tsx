import type { ComponentChildren } from "preact";

interface Props {
  act: () => void;
  /** Undefined for buttons without an on state. */
  isPressed?: boolean;
  isDisabled?: boolean;
  /** Not available at the moment, but keeps the focus: `disabled` would lose it. */
  isBusy?: boolean;
  /** Further classes. */
  kind?: string;
  title?: string;
  /** Label for screen readers: `−` is "zoom out". */
  label?: string;
  children: ComponentChildren;
}

export function Button(props: Props) {
  const { act, isPressed, isDisabled, isBusy, kind = "", title, label, children } = props;
  return (
    <button
      type="button"
      class={`hm-button ${kind}`}
      title={title}
      aria-label={label}
      aria-pressed={isPressed}
      aria-disabled={isBusy}
      disabled={isDisabled}
      onClick={() => !isBusy && act()}
    >
      {children}
    </button>
  );
}
