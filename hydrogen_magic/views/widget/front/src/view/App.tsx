import { useRef } from "preact/hooks";
import { Curves } from "../curves/Curves";
import { counted } from "../format";
import type { Page } from "../page";
import type { Theme } from "../theme";
import { Timeline } from "../timeline/Timeline";
import { Failure } from "./Failure";
import { Header } from "./Header";
import { useStore, useTheme } from "./hooks";
import { useOwnKeys } from "./keys";
import { Output } from "./Output";
import { Ranks } from "./Ranks";
import { Stacks } from "./Stacks";
import { Waiting } from "./Waiting";

/** The whole view under the cell. */
export function App({ page }: { page: Page }) {
  const version = useStore(page.store);
  const root = useRef<HTMLDivElement>(null);
  const theme = useTheme(root);
  useOwnKeys(root);
  const { gang } = page.store;
  const label = gang ? `Gang ${gang.id}, ${counted(gang.np, "rank")}` : "Gang";
  return (
    // biome-ignore lint/a11y/useSemanticElements: a fieldset is for forms
    <div class="hm" ref={root} role="group" aria-label={label}>
      {theme !== null && <Body page={page} theme={theme} version={version} />}
    </div>
  );
}

function Body({ page, theme, version }: { page: Page; theme: Theme; version: number }) {
  const { store, ask } = page;
  const { gang } = store;
  if (gang === null) return <Waiting refusal={page.refusal} />;
  const common = { version, theme, ask, np: gang.np, isLive: !store.isOver, gangId: gang.id };
  return (
    <>
      <Header page={page} gang={gang} />
      {store.report && <Failure report={store.report} />}
      <Ranks {...common} store={store} />
      <Curves {...common} store={store.curves} ranks={store.ranks} />
      <Timeline
        {...common}
        store={store.spans}
        isPaged={store.summary !== null}
        phaseOf={(rank) => store.phaseOf(rank)}
        nowS={() => store.nowS()}
      />
      <Output {...common} store={store} />
      {store.stacks && <Stacks store={store} stacks={store.stacks} />}
    </>
  );
}
