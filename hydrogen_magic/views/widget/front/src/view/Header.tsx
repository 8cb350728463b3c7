import { useLayoutEffect, useRef } from "preact/hooks";
import { counted, duration, rate, roughly } from "../format";
import type { Page } from "../page";
import type { Gang, Notice } from "../protocol";
import type { Store } from "../store";
import { Button } from "./Button";
import { useTick } from "./hooks";
import { RowsDone } from "./Rows";
import { Shape, STATES } from "./shapes";

const STEPS = 5;
const STOP = "Ask all ranks to stop; ranks that do not stop are killed";

interface Props {
  page: Page;
  gang: Gang;
}

export function Header({ page, gang }: Props) {
  const isLive = !page.store.isOver;
  useTick(isLive, 1000);
  return (
    <header class="hm-header">
      <div class="hm-line">
        <Pill page={page} gang={gang} />
        <Facts page={page} gang={gang} />
        <Controls page={page} gang={gang} />
      </div>
      {gang.rows && <RowsDone gang={gang} rows={gang.rows} isLive={isLive} isLost={page.isLost} />}
      <Notices page={page} gang={gang} />
    </header>
  );
}

function Pill({ page, gang }: Props) {
  const isStarted = gang.state === "running" || gang.state === "starting";
  const isStopping = page.stopping.isAsked && isStarted;
  const word = page.isLost ? "no contact" : isStopping ? "stopping" : gang.state;
  const { shape, tone } = STATES[word];
  const places = gang.queued && gang.state === "queued" ? ` ${gang.queued.join("/")}` : "";
  return (
    <span class={`hm-pill hm-${tone}`} role="status" data-state={word}>
      <Shape name={shape} />
      {word}
      {places}
    </span>
  );
}

function Facts({ page, gang }: Props) {
  const { store, isLost } = page; // when lost, estimates are of the past
  const isLive = !store.isOver;
  const ranks = counted(gang.np, "rank");
  const attempt = gang.attempt > 0 ? `attempt ${gang.attempt + 1}` : "";
  const met = gang.rows ? "" : gang.rendezvous; // ranks that predict use no rendezvous
  const setup = [ranks, gang.placement, met, attempt].filter(Boolean).join(" · ");
  return (
    <div class="hm-facts">
      <b title={gang.title}>{gang.id}</b>
      <span class="hm-quiet">{setup}</span>
      {gang.sending && !isLost && !gang.stop_reason && (
        <span class="hm-sending">{gang.sending}</span>
      )}
      <Elapsed store={store} isLive={isLive} />
      {isLive && !isLost && gang.outermost && <span>{gang.outermost}</span>}
      {isLive && !isLost && gang.remaining_s !== null && (
        <span>~{roughly(gang.remaining_s)} left</span>
      )}
      {!isLost && gang.steps_per_s !== null && <span>{rate(gang.steps_per_s)} steps/s</span>}
    </div>
  );
}

/** Continues between messages, which shows that the page is alive. */
function Elapsed({ store, isLive }: { store: Store; isLive: boolean }) {
  useTick(isLive, store.nowS() < 10 ? 100 : 500);
  return (
    <span class="hm-elapsed" role="timer" aria-live="off">
      {duration(store.nowS())}
    </span>
  );
}

// ── controls ────────────────────────────────────────────────────────────────────────────────────

const PROFILING: Record<Gang["profiling"], string> = {
  "": `Profile ${STEPS} steps`,
  waiting: "Waiting for a step…",
  recording: "Recording…",
  reading: "Reading the trace…",
};

function Controls({ page, gang }: Props) {
  const isLive = !page.store.isOver;
  const box = useRef<HTMLDivElement>(null);
  useKeptFocus(box, isLive);
  return (
    <div class="hm-controls" ref={box} tabIndex={-1}>
      {isLive && (
        <>
          {canRecord(gang) && <Recorders page={page} gang={gang} />}
          <Button
            title="Show the current stack of every thread of every rank"
            isBusy={page.isLost}
            act={() => void page.ask({ do: "stacks" })}
          >
            Stacks
          </Button>
          <StopButtons page={page} gang={gang} />
        </>
      )}
    </div>
  );
}

/** Recording is started by messages: a rank inside the kernel gets none while its cell runs. */
const canRecord = ({ placement, state }: Gang) =>
  placement !== "inline" && state !== "stopping" && state !== "killing";

function Recorders({ page, gang }: Props) {
  const timeline = gang.recording
    ? "Ranks are recording; press to stop the recording"
    : "Record a timeline of when every rank loads data, computes and waits for others";
  return (
    <>
      <Button
        title={timeline}
        isPressed={gang.recording}
        isBusy={page.isLost}
        act={() => void page.ask({ do: "record", on: !gang.recording })}
      >
        Record timeline
      </Button>
      {!gang.rows && ( // there are no optimizer steps to wait for
        <Button
          title={`Profile the next ${STEPS} steps of every rank, operator by operator, with the torch profiler`}
          isBusy={page.isLost || gang.profiling !== ""}
          act={() => void page.ask({ do: "profile", steps: STEPS })}
        >
          {PROFILING[gang.profiling]}
        </Button>
      )}
    </>
  );
}

/** When the buttons disappear, focus that was on one of them stays in the widget. */
function useKeptFocus(box: { current: HTMLElement | null }, isLive: boolean): void {
  const hadFocus = useRef(false);
  if (isLive) hadFocus.current = box.current?.contains(document.activeElement) ?? false;
  useLayoutEffect(() => {
    if (!isLive && hadFocus.current) box.current?.focus({ preventScroll: true });
  }, [isLive, box]);
}

function StopButtons({ page, gang }: Props) {
  const { stopping } = page;
  // An attempt that has failed is ended before the next one: only a stop prevents that.
  const isGangStopping = gang.state === "stopping" && gang.stop_reason !== "failure";
  const isStopping = stopping.isAsked || isGangStopping || gang.state === "killing";
  const isKilling = stopping.isKilling || gang.state === "killing";
  // On the left: where Stop was, a further click of an impatient user must not kill.
  return (
    <>
      {(stopping.isKillOffered || stopping.isKilling) && page.canStop && (
        <Button
          kind="hm-stop hm-kill"
          title="Kill all ranks at once; nothing more is saved"
          isBusy={isKilling}
          act={() => stopping.kill()}
        >
          Kill now
        </Button>
      )}
      <Button
        kind="hm-stop"
        title={page.canStop ? STOP : page.unreachable}
        isBusy={isStopping || !page.canStop}
        act={() => stopping.stop()}
      >
        {isKilling ? "Killing…" : isStopping ? "Stopping…" : "Stop"}
      </Button>
    </>
  );
}

// ── one line each ───────────────────────────────────────────────────────────────────────────────

function Notices({ page, gang }: Props) {
  const { said } = page;
  const lines: Notice[] = [
    ...warnings(page.unreachable, page.stopping.hint, ...gang.warnings),
    ...gang.notices,
    ...(page.store.report ? [] : [{ level: "info" as const, text: gang.reason }]),
    { level: said?.ok ? "info" : "warning", text: said?.text ?? "" },
  ];
  const shown = new Map(lines.map((line) => [line.text, line]));
  shown.delete("");
  return (
    <ul class="hm-notices" aria-live="polite" aria-label="Notices">
      {[...shown.values()].map(({ level, text }) => (
        <li key={text} class={`hm-notice hm-${level}`}>
          {level !== "info" && <Shape name={level === "error" ? "cross" : "slow"} />}
          {text}
        </li>
      ))}
    </ul>
  );
}

const warnings = (...texts: readonly string[]): Notice[] =>
  texts.map((text) => ({ level: "warning", text }));
