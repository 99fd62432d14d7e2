// A chat about a document under two policies. Each side has its own history, and computes its own beginnings.
const salt = String(Math.random()).slice(2);
let stopper = null, sides = [[], []], chat = 0;

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
  const messages = [...sides[number], { role: "user", content: question }], mine = chat;
  const text = element("p", "", "said"), place = element("div");
  let first = null, usage = null;
  talk.append(element("p", sides[number].length ? question : at("question").value, "asked"), text, place);
  at("title" + number).textContent = policy;
  try {
    const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), signal,
      body: JSON.stringify({ messages, policy, temperature: 0, max_tokens: Number(at("most").value), stream: true,
        cache_salt: salt + number, stream_options: { include_usage: true } }) });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let said = "";
    for (let held = "", part; !(part = await reader.read()).done;) {
      const lines = (held + part.value).split("\n");
      held = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: {")) continue;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new Error(event.error.message);
        for (const choice of event.choices) {
          first ??= (performance.now() - began) / 1000;
          said += choice.delta.content ?? "";
          text.textContent += choice.delta.reasoning ?? choice.delta.content ?? "";
        }
        if (event.usage) usage = event.usage;
      }
    }
    if (!text.textContent) text.textContent = "(the model said nothing)";
    if (mine !== chat) return null;
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
  chat++;
  sides = [[], []];
  for (const number of [0, 1]) { at("talk" + number).replaceChildren(); at("title" + number).textContent = ["First answer", "Second answer"][number]; }
  at("verdict").textContent = "";
  at("mapped").hidden = true;
  at("question").focus();
});

async function measure() { // the document's length in the model's own tokens
  const text = at("document").value, said = at("size");
  if (!text) { said.textContent = ""; return; }
  try {
    const answer = await fetch("/tokenize", { method: "POST", headers: headers(), body: JSON.stringify({ prompt: text }) });
    if (!answer.ok) throw new Error();
    const found = await answer.json();
    if (text === at("document").value) said.textContent = `${whole(found.count)} tokens, and the model reads ${whole(found.max_model_len)}`;
  } catch { said.textContent = `${whole(text.length)} characters`; }
}

const take = async (file) => { if (file) { at("document").value = await file.text(); await measure(); } };
at("file").addEventListener("change", () => take(at("file").files[0]));
at("document").addEventListener("change", measure);
at("document").addEventListener("dragover", (event) => { event.preventDefault(); at("document").classList.add("over"); });
at("document").addEventListener("dragleave", () => at("document").classList.remove("over"));
at("document").addEventListener("drop", (event) => { event.preventDefault(); at("document").classList.remove("over");
  take(event.dataTransfer.files[0]); });
document.addEventListener("visibilitychange", () => { before = null; look(); });
look(); setInterval(look, EVERY);
