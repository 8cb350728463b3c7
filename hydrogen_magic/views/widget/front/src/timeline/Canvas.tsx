import { useEffect, useRef, useState } from "preact/hooks";
import { byKey } from "../range";
import type { Theme } from "../theme";
import { usePainter } from "../view/usePainter";
import type { NameColors } from "./colors";
import { draw } from "./draw";
import { LEAST_S, type Scale } from "./geometry";
import { type Hit, hit } from "./hit";
import { GUTTER_PX, type Layout } from "./layout";
import { free, type Look, rangeOf, zoomed } from "./look";
import { listen } from "./pointer";
import type { SpanStore } from "./store";

const PAINT_INTERVAL_MS = 100;

export interface CanvasProps {
  store: SpanStore;
  layout: Layout;
  /** Identifies a choice of lanes. */
  arrangement: string;
  theme: Theme;
  colors: NameColors;
  widthPx: number;
  look: Look;
  setLook: (look: Look) => void;
  highlight: string | null;
  phaseOf: (rank: number) => string;
  /** The current end of the run. */
  endS: () => number;
  isLive: boolean;
  /** Description of the picture in words. */
  label: string;
  /** The user clicked on the label of a rank. */
  toggleRank: (rank: number) => void;
}

interface Shown extends Hit {
  x: number;
  y: number;
}

const scaleOf = ({ look, widthPx, endS }: CanvasProps): Scale => ({
  range: rangeOf(look, endS()),
  leftPx: GUTTER_PX,
  widthPx: Math.max(1, widthPx - GUTTER_PX),
});

export function Canvas(props: CanvasProps) {
  const { store, layout, arrangement, widthPx, look, theme, highlight, label, isLive, endS } =
    props;
  const canvas = useRef<HTMLCanvasElement>(null);
  const [shown, setShown] = useState<Shown | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const painter = usePainter(
    () => canvas.current && paint(canvas.current, props),
    PAINT_INTERVAL_MS,
  );
  // the listeners exist as long as their element
  useEffect(() => {
    const element = canvas.current as HTMLCanvasElement;
    painter.watch(element);
    return listen(element, actionsOf(latest, setShown));
  }, []);
  // new data and the passing time are painted at a limited rate
  useEffect(() => painter.ask(), [store.version, isLive ? endS() : 0]);
  // interactions are painted at once
  useEffect(
    () => painter.askNow(),
    [look, widthPx, theme, highlight, arrangement, layout.heightPx],
  );
  return (
    <div class="hm-timeline-stage">
      <canvas
        ref={canvas}
        role="img"
        aria-label={label}
        tabIndex={0}
        style={{ height: `${layout.heightPx}px` }}
        onKeyDown={(event) => key(event, latest.current)}
      />
      {shown !== null && <Tooltip shown={shown} widthPx={widthPx} />}
    </div>
  );
}

function actionsOf(latest: { current: CanvasProps }, show: (shown: Shown | null) => void) {
  return {
    scale: () => scaleOf(latest.current),
    zoom: (atS: number, factor: number) => zoomAt(latest.current, atS, factor),
    move: (range: readonly [number, number]) => {
      const { setLook, endS } = latest.current;
      setLook(free(range, endS()));
    },
    hover: (x: number, y: number) => {
      const { store, layout } = latest.current;
      const found = hit(store, layout, scaleOf(latest.current), x, y);
      show(found && { ...found, x, y });
    },
    leave: () => show(null),
    click: (x: number, y: number) => {
      const label = latest.current.layout.labels.findLast((label) => y >= label.y - 12);
      if (x < GUTTER_PX && label) latest.current.toggleRank(label.rank);
    },
  };
}

export function zoomAt({ look, setLook, endS, isLive }: CanvasProps, atS: number, factor: number) {
  setLook(zoomed(look, atS, factor, endS(), isLive));
}

function key(event: KeyboardEvent, { look, setLook, endS, isLive }: CanvasProps): void {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const range = rangeOf(look, endS());
  const bounds = [0, Math.max(endS(), range[1])] as const;
  const moved =
    event.key === "End" && isLive
      ? "live"
      : byKey(event.key === "Escape" ? "0" : event.key, range, bounds, LEAST_S);
  if (moved === null) return;
  event.preventDefault();
  if (moved === "live") setLook({ kind: "live", widthS: range[1] - range[0] });
  else setLook(moved === "whole" ? { kind: "whole" } : free(moved, endS()));
}

function paint(canvas: HTMLCanvasElement, props: CanvasProps): void {
  const { layout, widthPx, store, theme, colors, highlight, phaseOf, endS } = props;
  const ctx = canvas.getContext("2d");
  if (ctx === null || widthPx <= 0) return;
  const pixelRatio = devicePixelRatio;
  const [width, height] = [widthPx, layout.heightPx].map((px) => Math.round(px * pixelRatio));
  if (canvas.width !== width) canvas.width = width as number;
  if (canvas.height !== height) canvas.height = height as number;
  const scale = scaleOf(props);
  draw(ctx, { store, layout, scale, theme, colors, highlight, phaseOf, endS: endS(), pixelRatio });
}

const TOOLTIP_PX = 260;

function Tooltip({ shown, widthPx }: { shown: Shown; widthPx: number }) {
  const isLeft = shown.x + TOOLTIP_PX > widthPx;
  const side = isLeft ? { right: `${widthPx - shown.x + 12}px` } : { left: `${shown.x + 14}px` };
  return (
    <div class="hm-tip" role="tooltip" style={{ ...side, top: `${shown.y + 14}px` }}>
      <b>{shown.title}</b>
      {shown.lines.map((line) => (
        <div key={line}>{line}</div>
      ))}
    </div>
  );
}
