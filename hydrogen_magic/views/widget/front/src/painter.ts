/**
 * Schedules repaints of canvases, and requests for their data: in an animation frame, at a limited
 * rate, and only if visible.
 */
export class Painter {
  private isAsked = false;
  private isSeen = true;
  private isOver = false;
  private paintedAtMs = Number.NEGATIVE_INFINITY;
  private wait: ReturnType<typeof setTimeout> | undefined;
  private observer: IntersectionObserver | null = null;

  constructor(
    private readonly paint: () => void,
    private readonly minIntervalMs: number,
  ) {}

  /** Repaints soon; several calls lead to one repaint. */
  ask(): void {
    if (this.isAsked || this.isOver) return;
    this.isAsked = true;
    const waitMs = this.paintedAtMs + this.minIntervalMs - performance.now();
    if (waitMs <= 0) requestAnimationFrame(this.run);
    else this.wait = setTimeout(() => requestAnimationFrame(this.run), waitMs);
  }

  /** Repaints at the next frame, regardless of the rate: after a user interaction. */
  askNow(): void {
    clearTimeout(this.wait);
    this.isAsked = false; // a repaint that waits for the rate would be too late
    this.paintedAtMs = Number.NEGATIVE_INFINITY;
    this.ask();
  }

  /** Paints only while `element` is on screen, or nearly so. */
  watch(element: Element): void {
    if (typeof IntersectionObserver === "undefined") return;
    this.observer = new IntersectionObserver(
      (entries) => this.setSeen(entries.some((entry) => entry.isIntersecting)),
      { rootMargin: "100px" },
    );
    this.observer.observe(element);
  }

  setSeen(isSeen: boolean): void {
    const appeared = isSeen && !this.isSeen;
    this.isSeen = isSeen;
    if (appeared) this.askNow();
  }

  end(): void {
    this.isOver = true;
    this.observer?.disconnect();
  }

  private readonly run = () => {
    if (!this.isAsked) return; // another frame has painted since
    this.isAsked = false;
    if (this.isOver || !this.isSeen) return;
    this.paintedAtMs = performance.now();
    this.paint();
  };
}
