// A chat about a document under two policies. Each side has its own history, and computes its own beginnings.
const salt = String(Math.random()).slice(2);
let stopper = null, sides = [[], []], round = 0;

function cost(usage, first, all) {
  const table = element("table"), said = usage.saccade, head = table.createTHead().insertRow(), body = table.createTBody();
  for (const name of ["", "prefill", "decode"]) {
    const cell = element(name ? "th" : "td", name);
    if (name) cell.scope = "col";
    head.append(cell);
  }
  const row = (name, ...cells) => { const line = body.insertRow(), label = element("th", name); label.scope = "row"; line.append(label);
    cells.forEach((cell) => { line.insertCell().textContent = cell; }); };
  row("density", percent(said.density.prefill), percent(said.density.decode));
  row("keys read a token", said.keys_read_per_token.prefill ?? "–", said.keys_read_per_token.decode ?? "–");
  row("attention weight read, estimated", percent(said.coverage_estimated.prefill), percent(said.coverage_estimated.decode));
  row("tokens", `${whole(usage.prompt_tokens)}, ${whole(usage.prompt_tokens_details.cached_tokens)} cached`, whole(usage.completion_tokens));
  row("seconds", first === null ? "–" : first.toFixed(2) + " to the first", all.toFixed(2) + " in all");
  const made = [table];
  if (said.notes.length) made.push(element("p", said.notes.join("; "), "note"));
  return made;
}

async function answer(number, question, signal) {
  const talk = at("talk" + number), began = performance.now(), policy = at("policy" + number).value;
  const messages = [...sides[number], { role: "user", content: question }], mine = round;
  const text = element("p", "", "said"), place = element("div");
  let first = null;
  talk.append(element("p", sides[number].length ? question : at("question").value, "asked"), text, place);
  at("title" + number).textContent = policy;
  try {
    const got = await converse({ messages, policy, temperature: 0, max_tokens: Number(at("most").value), cache_salt: salt + number }, signal, (now) => {
      first ??= (performance.now() - began) / 1000;
      text.textContent = now.thoughts + now.text;
    });
    const usage = got.usage, said = got.text;
    if (!text.textContent) text.textContent = "(the model said nothing)";
    if (mine !== round) return null;
    const all = (performance.now() - began) / 1000;
    sides[number] = [...messages, { role: "assistant", content: said }];
    place.replaceChildren(...cost(usage, first, all));
    if (requests.maps && usage.prompt_tokens <= requests.maps) {
      const button = element("button", "Selection map");
      button.type = "button";
      button.addEventListener("click", () => showMap({ messages, policy, max_tokens: Math.min(33, Math.max(2, usage.completion_tokens)) }, number));
      place.append(button);
    }
    return { usage, first, all, text: text.textContent };
  } catch (error) {
    text.className = "said bad";
    text.textContent += (text.textContent ? "\n" : "") + (error.name === "AbortError" ? "stopped" : error.message);
    return null;
  }
}

function compare([one, two]) {
  const keys = ({ usage }) => ["prefill", "decode"].reduce((sum, phase) => sum
    + (usage.saccade.keys_read_per_token[phase] ?? 0) * (phase === "prefill"
      ? usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens : usage.completion_tokens - 1), 0);
  const same = one.text === two.text ? "The answers are the same." : "The answers differ.";
  const less = keys(one) ? ` The second policy read ${percent(keys(two) / keys(one))} of the keys that the first one read,` : "";
  at("verdict").textContent = `${same}${less} and took ${two.all.toFixed(2)} s against ${one.all.toFixed(2)} s.`;
}

at("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (stopper) stopper.abort();
  const mine = stopper = new AbortController(), got = [];
  at("stop").disabled = false;
  at("verdict").textContent = "";
  for (const number of [0, 1]) { // apart: their times are their own
    if (mine.signal.aborted) break;
    const parts = sides[number].length ? [] : [at("document").value];
    got.push(await answer(number, [...parts, at("question").value].filter(Boolean).join("\n\n"), mine.signal));
  }
  if (mine === stopper) { at("stop").disabled = true; stopper = null; }
  if (got.length === 2 && got.every(Boolean)) compare(got);
});
at("stop").addEventListener("click", () => stopper && stopper.abort());
at("anew").addEventListener("click", () => {
  if (stopper) stopper.abort();
  round++;
  sides = [[], []];
  for (const number of [0, 1]) { at("talk" + number).replaceChildren(); at("title" + number).textContent = ["First answer", "Second answer"][number]; }
  at("verdict").textContent = "";
  at("mapped").hidden = true;
  at("question").focus();
});

async function measure() { // the document's length in the model's own tokens
  const text = at("document").value, said = at("size");
  said.className = "note";
  if (!text) { said.textContent = ""; return; }
  const found = await tokensOf(text);
  if (text === at("document").value) said.textContent = found === null ? `${whole(text.length)} characters`
    : `${whole(found.count)} tokens, and the model reads ${whole(found.most)}`;
}

const take = async (file) => {
  if (!file) return;
  try {
    at("document").value = await textOf(file);
    await measure();
  } catch (error) {
    at("size").textContent = error.message;
    at("size").className = "note bad";
  }
};
at("file").addEventListener("change", () => take(at("file").files[0]));
at("document").addEventListener("change", measure);
at("document").addEventListener("dragover", (event) => { event.preventDefault(); at("document").classList.add("over"); });
at("document").addEventListener("dragleave", () => at("document").classList.remove("over"));
at("document").addEventListener("drop", (event) => { event.preventDefault(); at("document").classList.remove("over");
  take(event.dataTransfer.files[0]); });
document.addEventListener("visibilitychange", () => { before = null; look(); });
look(); setInterval(look, EVERY);
