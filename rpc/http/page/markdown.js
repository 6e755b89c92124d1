// Markdown as nodes: paragraphs, headings, lists, quotes, rules, code in fences and in line, bold, italics. What it does not
// know stays text, and so does all HTML: nodes are made, never parsed.
const FENCE = /^ {0,3}```\s*([\w+-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const INLINE = /(`+)(.+?)\1|\*\*(?=\S)(.+?)\*\*|\*(?=[^\s*])(.+?)\*|(?<!\w)_(?=\S)(.+?)_(?!\w)/s;

export function markdown(text) {
  const root = document.createDocumentFragment(), lines = text.split("\n");
  for (let i = 0; i < lines.length; ) {
    const fence = FENCE.exec(lines[i]), heading = HEADING.exec(lines[i]);
    if (lines[i].trim() === "") i++;
    else if (fence) i = code(root, lines, i, fence[1]);
    else if (heading) root.append(element("h4", ...inline(heading[2]))), i++;
    else if (/^ {0,3}([-*_])( *\1){2,}\s*$/.test(lines[i])) root.append(element("hr")), i++;
    else if (ITEM.test(lines[i])) i = list(root, lines, i);
    else if (/^>/.test(lines[i])) i = quote(root, lines, i);
    else i = paragraph(root, lines, i);
  }
  return root;
}

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

// A fence that has no end yet is code to the end: the answer is still coming.
function code(root, lines, start, language) {
  let end = start + 1;
  while (end < lines.length && !/^ {0,3}```\s*$/.test(lines[end])) end++;
  const block = element("code", lines.slice(start + 1, end).join("\n"));
  if (language) block.dataset.language = language;
  root.append(element("pre", block));
  return end + 1;
}

function list(root, lines, start) {
  const first = ITEM.exec(lines[start]), made = element(/\d/.test(first[2]) ? "ol" : "ul");
  if (made.localName === "ol") made.start = parseInt(first[2], 10);
  const depth = first[1].length;
  let i = start;
  while (i < lines.length) {
    const item = ITEM.exec(lines[i]);
    if (item && item[1].length > depth + 1 && made.lastChild) i = list(made.lastChild, lines, i);
    else if (item && Math.abs(item[1].length - depth) <= 1) made.append(element("li", ...inline(item[3]))), i++;
    else if (!item && /^\s+\S/.test(lines[i]) && made.lastChild) made.lastChild.append(" ", ...inline(lines[i].trim())), i++;
    else break;
  }
  root.append(made);
  return i;
}

function quote(root, lines, start) {
  let end = start;
  while (end < lines.length && /^>/.test(lines[end])) end++;
  root.append(element("blockquote", markdown(lines.slice(start, end).map((line) => line.replace(/^> ?/, "")).join("\n"))));
  return end;
}

function paragraph(root, lines, start) {
  let end = start + 1;
  const ends = (line) => line.trim() === "" || FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || /^>/.test(line);
  while (end < lines.length && !ends(lines[end])) end++;
  root.append(element("p", ...inline(lines.slice(start, end).join("\n"))));
  return end;
}

function inline(text) {
  const nodes = [];
  for (let rest = text; rest !== ""; ) {
    const found = INLINE.exec(rest);
    if (!found) return [...nodes, rest];
    if (found.index) nodes.push(rest.slice(0, found.index));
    if (found[1]) nodes.push(element("code", found[2]));
    else if (found[3]) nodes.push(element("strong", ...inline(found[3])));
    else nodes.push(element("em", ...inline(found[4] ?? found[5])));
    rest = rest.slice(found.index + found[0].length);
  }
  return nodes;
}
