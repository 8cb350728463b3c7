import { expect, test } from "vitest";
import { safeFragment } from "../src/safe";

function kept(html: string): string {
  const box = document.createElement("div");
  box.append(safeFragment(html));
  return box.innerHTML;
}

test.each([
  ["<p>a <b>b</b> &lt;i&gt;</p>", "<p>a <b>b</b> &lt;i&gt;</p>"],
  ["<script>alert(1)</script>a", "a"],
  ["<img src=x onerror=alert(1)>", "<img>"],
  ['<img src="https://elsewhere.example/a.png">', "<img>"],
  [
    '<img src="data:image/svg+xml;base64,PHN2Zy8+">',
    '<img src="data:image/svg+xml;base64,PHN2Zy8+">',
  ],
  ['<img src="data:text/html;base64,PHN2Zy8+">', "<img>"],
  ['<a href="javascript:alert(1)">a</a>', "<a>a</a>"],
  ['<iframe srcdoc="<p>a</p>"></iframe>', ""],
  ["<svg><script>alert(1)</script></svg>", ""],
  ['<p style="background:url(//elsewhere.example)">a</p>', "<p>a</p>"],
  ['<p style="color:red" onclick="alert(1)" id="x">a</p>', '<p style="color:red">a</p>'],
  ["<form action=//elsewhere.example><input></form>", ""],
])("%s", (html, expected) => expect(kept(html)).toBe(expected));

test("style sheets that reach out are left out, others stay", () => {
  expect(kept("<div><style>@import '//elsewhere.example';</style></div>")).toBe("<div></div>");
  expect(kept("<div><style>.a{color:red}</style></div>")).toContain(".a{color:red}");
});
