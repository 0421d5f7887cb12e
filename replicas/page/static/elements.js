// Elements by description. Texts only become text nodes: no markup is parsed.

const SVG = "http://www.w3.org/2000/svg";
const IN_SVG = new Set(["svg", "g", "rect", "path", "line", "text", "title", "circle", "pattern", "defs"]);
const LAST = Symbol("the properties that were set last");

/** Describe an element; `key` identifies it among its siblings, so that its node is kept. */
export function h(tag, props, ...children) {
  return { tag, props: props ?? {}, children };
}

/** Make the children of `parent` as described, with as few changes as possible. */
export function draw(parent, ...described) {
  const wanted = described.flat(Infinity).filter((one) => one != null && one !== false && one !== "");
  const keyed = new Map();
  for (const node of parent.childNodes) if (node[LAST]?.key !== undefined) keyed.set(node[LAST].key, node);
  const kept = new Set(wanted.map((one) => one.props?.key).filter((key) => key !== undefined));
  let at = parent.firstChild;
  for (const one of wanted) {
    while (at?.[LAST]?.key !== undefined && !kept.has(at[LAST].key)) at = dropped(at); // so that no other node moves
    const key = one.props?.key;
    let node = key === undefined ? at : keyed.get(key);
    if (!node || !fits(node, one, key)) node = made(one);
    if (node === at) at = at.nextSibling;
    else parent.insertBefore(node, at);
    fill(node, one);
  }
  while (at) at = dropped(at);
}

function dropped(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

function fits(node, one, key) {
  if (one.tag === undefined) return node.nodeType === Node.TEXT_NODE;
  return node.nodeType === Node.ELEMENT_NODE && node.localName === one.tag && node[LAST]?.key === key;
}

function made(one) {
  if (one.tag === undefined) return document.createTextNode("");
  return IN_SVG.has(one.tag) && one.tag !== "title" ? document.createElementNS(SVG, one.tag)
    : one.tag === "title" ? document.createElementNS(SVG, "title") : document.createElement(one.tag);
}

function fill(node, one) {
  if (one.tag === undefined) {
    const text = String(one);
    if (node.data !== text) node.data = text;
    return;
  }
  const before = node[LAST] ?? {};
  for (const name of Object.keys(before)) if (!(name in one.props)) set(node, name, undefined);
  for (const [name, value] of Object.entries(one.props)) if (before[name] !== value) set(node, name, value);
  node[LAST] = one.props;
  if (!one.props.own) draw(node, one.children); // `own`: its children are drawn elsewhere
}

function set(node, name, value) {
  if (name === "key" || name === "own") return;
  if (name.startsWith("on")) node[name] = value ?? null;
  else if (name === "css") for (const [key, one] of Object.entries(value ?? {})) node.style.setProperty(key, one);
  else if (name === "value" || name === "checked") node[name] = value ?? "";
  else if (value === undefined || value === null || value === false) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? "" : value);
}
