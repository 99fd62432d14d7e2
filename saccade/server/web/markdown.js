// Markdown of a model as elements. HTML in it is text, addresses other than http, https and mailto are no links, and
// pictures, which would be fetched from elsewhere, are links.
const md = (() => {
  const made = markdownit({ html: false, linkify: true, maxNesting: 40 }), escaped = made.utils.escapeHtml;
  const link = made.validateLink;
  made.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
  made.validateLink = (address) => link(address) && !/^\s*data:/i.test(address);
  const linked = (address) => "<a" + made.renderer.renderAttrs({ attrs: [["href", address], ["target", "_blank"], ["rel", "noopener noreferrer nofollow"]] }) + ">";
  made.renderer.rules.link_open = (tokens, at) => linked(tokens[at].attrGet("href"));
  made.renderer.rules.image = (tokens, at) => linked(tokens[at].attrGet("src")) + escaped(tokens[at].content || "picture") + "</a>";
  const code = (tokens, at) => `<div class="code"><div class="bar"><span>${escaped((tokens[at].info || "").trim().split(/\s+/)[0])}</span>`
    + `<button type="button" class="copy" aria-label="Copy this code">Copy</button></div><pre tabindex="0"><code>${escaped(tokens[at].content)}</code></pre></div>`;
  made.renderer.rules.fence = made.renderer.rules.code_block = code;
  made.renderer.rules.table_open = () => '<div class="wide" tabindex="0" role="group" aria-label="Table"><table>';
  made.renderer.rules.table_close = () => "</table></div>";
  for (const cell of ["th", "td"]) // the page's policy refuses styles of elements
    made.renderer.rules[cell + "_open"] = (tokens, at) => {
      const side = /text-align:(\w+)/.exec(tokens[at].attrGet("style") || "");
      return `<${cell}${side ? ` class="${side[1]}"` : ""}${cell === "th" ? ' scope="col"' : ""}>`;
    };
  return made;
})();

function markdown(text) {
  const made = document.createElement("template");
  made.innerHTML = md.render(text);
  return made.content;
}

async function copied(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // an address without TLS has no clipboard
    const area = element("textarea", text);
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = before; }, 1500);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest?.(".code .copy");
  if (button) copied(button.closest(".code").querySelector("code").textContent, button);
});
