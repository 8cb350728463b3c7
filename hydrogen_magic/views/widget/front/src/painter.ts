/**
 * Schedules repaints of canvases, and requests for their data: in an animation frame, at a limited
 * rate, and only if visible.
 */

interface Clock {
  nowMs: () => number;
  frame: (paint: () => void) => void;
  later: (paint: () => void, ms: number) => void;
}

const BROWSER: Clock = {
  nowMs: () => performance.now(),
  frame: (paint) => void requestAnimationFrame(paint),
  later: (paint, ms) => void setTimeout(paint, ms),
};

export class Painter {
  private isAsked = false;
  private isSeen = true;
  private isOver = false;
  private paintedAtMs = Number.NEGATIVE_INFINITY;
  private observer: IntersectionObserver | null = null;

  constructor(
    private readonly paint: () => void,
    private readonly minIntervalMs: number,
    private readonly clock: Clock = BROWSER,
  ) {}

  /** Repaints soon; several calls lead to one repaint. */
  ask(): void {
    if (this.isAsked || this.isOver) return;
    this.isAsked = true;
    const waitMs = this.paintedAtMs + this.minIntervalMs - this.clock.nowMs();
    if (waitMs <= 0) this.clock.frame(this.run);
    else this.clock.later(() => this.clock.frame(this.run), waitMs);
  }

  /** Repaints at the next frame, regardless of the rate: after a user interaction. */
  askNow(): void {
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
    this.isAsked = false;
    if (this.isOver || !this.isSeen) return;
    this.paintedAtMs = this.clock.nowMs();
    this.paint();
  };
}
