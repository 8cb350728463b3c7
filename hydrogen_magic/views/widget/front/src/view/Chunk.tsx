import { useMemo } from "preact/hooks";
import { type Cut, cutOf } from "../lines";
import type { Line } from "../protocol";
import { colorOf } from "../theme";
import { type Mark, Text } from "./Text";

/** Lines that are laid out together; the browser skips invisible chunks. */
export const CHUNK_LINES = 100;

interface Props {
  /** Number of the first line, counted from the first one received. */
  first: number;
  lines: readonly Line[];
  rank: number | null;
  marks: readonly (Mark & { line: number })[];
  wanted: string;
  /** The current mark, empty if it is in another chunk. */
  current: string;
}

/** Rendered again only if its appearance may change; lines themselves never change. */
export function Chunk(props: Props) {
  const { first, lines, rank, wanted, current } = props;
  return useMemo(() => <Rows {...props} />, [first, lines.length, lines[0], rank, wanted, current]);
}

function Rows({ first, lines, rank, marks }: Props) {
  const rows = lines.flatMap((line, i) => {
    if (rank !== null && line[0] !== rank) return [];
    const its = marks.filter((mark) => mark.line === first + i);
    return [<Row key={first + i} k={first + i} line={line} marks={its} />];
  });
  if (rows.length === 0) return null;
  return (
    <div class="hm-chunk" style={{ "--hm-n": rows.length }}>
      {rows}
    </div>
  );
}

const STREAMS = ["stdout", "stderr", "note"] as const;

interface RowProps {
  k: number;
  line: Line;
  marks: readonly Mark[];
}

function Row({ k, line, marks }: RowProps) {
  const [rank, stream, , at_s] = line;
  const cut: Cut = cutOf(line);
  return (
    <div class="hm-row" data-line={k} data-stream={STREAMS[stream]}>
      <span class="hm-gutter" style={{ borderColor: colorOf(rank) }} title={when(at_s)}>
        {rank}
      </span>
      <span class="hm-text">
        <Text runs={cut.runs} marks={marks} />
        {"\n"}
      </span>
    </div>
  );
}

const when = (at_s: number) => `${at_s.toFixed(2)} s`;
