import { expect, test } from "vitest";
import { parseAnsi, plainOf } from "../src/ansi";
import { cutAtMarks } from "../src/view/Text";

const styles = (text: string) => parseAnsi(text).map((run) => [run.text, run.style]);

test("text without colours is one run", () => {
  expect(styles("plain [31m <b>")).toEqual([["plain [31m <b>", {}]]);
  expect(parseAnsi("")).toEqual([]);
});

test.each([
  ["\x1b[31ma", { fg: 1 }],
  ["\x1b[97;41ma", { fg: 15, bg: 1 }],
  [
    "\x1b[1;2;3;4;7;9ma",
    { bold: true, faint: true, italic: true, underline: true, inverse: true, strike: true },
  ],
  ["\x1b[1;31m\x1b[22ma", { fg: 1 }],
  ["\x1b[31;42m\x1b[39;49ma", {}],
  ["\x1b[31m\x1b[ma", {}],
  ["\x1b[38;5;9ma", { fg: 9 }],
  ["\x1b[38;5;208ma", { fg: "rgb(255 135 0)" }],
  ["\x1b[48;5;255ma", { bg: "rgb(238 238 238)" }],
  ["\x1b[38;2;1;2;300ma", { fg: "rgb(1 2 255)" }],
  ["\x1b[38:2::1:2:3;1ma", { fg: "rgb(1 2 3)", bold: true }],
  ["\x1b[38ma", {}],
  ["\x1b[1;4m\x1b[4:0ma", { bold: true }],
  ["\x1b[4:3;31ma", { underline: true, fg: 1 }],
  ["\x1b[38;5;31;1ma", { fg: "rgb(0 135 175)", bold: true }],
  ["\x1b[999;;;ma", {}],
])("%j", (text, style) => {
  expect(styles(text)).toEqual([["a", style]]);
});

test("colours hold until they are changed, and the text is whole", () => {
  const runs = parseAnsi("a\x1b[32mb\x1b[1mc\x1b[0md");
  expect(runs.map((run) => run.style)).toEqual([{}, { fg: 2 }, { fg: 2, bold: true }, {}]);
  expect(plainOf(runs)).toBe("abcd");
});

test("marks cut runs where they begin and end", () => {
  const marks = [
    { from: 1, until: 4, isCurrent: false },
    { from: 5, until: 6, isCurrent: true },
  ];
  const pieces = cutAtMarks(parseAnsi("ab\x1b[32mcdef"), marks);
  expect(pieces.map(({ run, mark }) => [run.text, mark?.isCurrent])).toEqual([
    ["a", undefined],
    ["b", false],
    ["cd", false],
    ["e", undefined],
    ["f", true],
  ]);
});
