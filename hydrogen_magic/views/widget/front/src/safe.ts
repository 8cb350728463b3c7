/** Elements and attributes that a picture may have; everything else is left out. */
const ELEMENTS = new Set(
  "a b br caption code col colgroup details div em figcaption figure h3 h4 hr i img li ol p pre span strong style summary table tbody td tfoot th thead tr u ul".split(
    " ",
  ),
);
const ATTRIBUTES = new Set(
  "align alt aria-hidden aria-label class colspan height open role rowspan scope src style title width".split(
    " ",
  ),
);
/** Ways by which a style could make the page ask another host. */
const REACHES_OUT = /url\s*\(|@import|image-set|expression|\\/i;
const PICTURE = /^data:image\/(svg\+xml|png);base64,[A-Za-z0-9+/=]*$/;

/**
 * Copies the harmless part of HTML, parsed where nothing of it runs. Our own pictures are escaped
 * already; but a saved notebook is a file that anybody may have written.
 */
export function safeFragment(html: string): DocumentFragment {
  const parsed = new DOMParser().parseFromString(html, "text/html");
  const fragment = document.createDocumentFragment();
  copyChildren(parsed.body, fragment);
  return fragment;
}

function copyChildren(from: Node, to: Node): void {
  for (const child of from.childNodes) {
    if (child.nodeType === Node.TEXT_NODE) to.appendChild(document.createTextNode(textOf(child)));
    else if (isAllowed(child)) to.appendChild(copied(child));
  }
}

const textOf = (node: Node) => node.textContent ?? "";

function isAllowed(node: Node): node is Element {
  if (!(node instanceof Element)) return false;
  const name = node.localName;
  if (name === "style") return !REACHES_OUT.test(textOf(node));
  return ELEMENTS.has(name);
}

function copied(element: Element): Element {
  const copy = document.createElement(element.localName);
  for (const { name, value } of element.attributes) {
    if (ATTRIBUTES.has(name) && isHarmless(name, value)) copy.setAttribute(name, value);
  }
  copyChildren(element, copy);
  return copy;
}

function isHarmless(name: string, value: string): boolean {
  if (name === "src") return PICTURE.test(value.replace(/\s/g, ""));
  return name !== "style" || !REACHES_OUT.test(value);
}
