import { Component, type FunctionComponent, h } from "preact";

/** A component that is rendered again only if its properties have changed. */
export function memo<P extends object>(
  inner: FunctionComponent<P>,
  isSame: (before: P, now: P) => boolean,
) {
  return class extends Component<P> {
    override shouldComponentUpdate(now: P): boolean {
      return !isSame(this.props as P, now);
    }
    override render() {
      return h(inner, this.props as P);
    }
  };
}
