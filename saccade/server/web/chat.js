// The chat: one conversation of those that are kept (chats.js).
let chosen = null, writing = null, written = null, attached = [];
const places = new WeakMap(); // where an answer is shown now

const current = () => chats.find((one) => one.id === chosen) ?? null;
const spoken = (text, bad) => { at("chatsaid").textContent = text; at("chatsaid").className = bad ? "note bad" : "note"; };

function begin() { // an empty conversation, if there is none yet
  const empty = chats.find((one) => !one.messages.length);
  if (!empty) chats.unshift({ id: newId(), messages: [] });
  choose((empty ?? chats[0]).id);
}

function choose(id) {
  chosen = id;
  attached = [];
  spoken("");
  listChats();
  showChat();
  showAttached();
}

function listChats() {
  at("chats").replaceChildren(...chats.map((one) => {
    const line = element("li"), open = element("button", titled(one), "open"), gone = element("button", "Delete", "gone");
    open.type = gone.type = "button";
    if (one.id === chosen) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => { choose(one.id); at("message").focus(); });
    gone.setAttribute("aria-label", `Delete the conversation “${titled(one)}”`);
    gone.addEventListener("click", () => {
      if (one.messages.length && !confirm(`Delete “${titled(one)}”? It cannot be brought back.`)) return;
      if (writing && one.messages.includes(written)) writing.abort();
      chats = chats.filter((each) => each !== one);
      deleted.add(one.id);
      keepChats();
      if (!chats.length || one.id === chosen) begin(); else listChats();
    });
    line.append(open, gone);
    return line;
  }));
}

function showChat() {
  const chat = current();
  at("log").replaceChildren(...(chat ? chat.messages.map((one) => shownMessage(one, chat)) : []));
  at("welcome").hidden = Boolean(chat?.messages.length);
  at("log").scrollTop = at("log").scrollHeight;
}

function shownMessage(one, chat) {
  const place = element("article", undefined, one.role === "user" ? "message mine" : "message theirs");
  place.setAttribute("aria-label", one.role === "user" ? "You" : "The model");
  if (one.role === "user") {
    for (const each of one.documents || []) place.append(element("p", documentLine(each), "paper"));
    if (one.content) place.append(element("p", one.content, "said"));
    return place;
  }
  const body = element("div", undefined, "body"), end = element("div", undefined, "end");
  place.append(body, end);
  places.set(one, { body, end });
  drawAnswer(body, one);
  drawEnd(end, one, chat);
  return place;
}

function drawAnswer(body, one) {
  const made = [];
  if (one.thoughts) {
    const thoughts = element("details");
    thoughts.open = !one.content;
    thoughts.append(element("summary", "Thoughts"), element("p", one.thoughts, "said note"));
    made.push(thoughts);
  }
  made.push(markdown(one.content));
  body.replaceChildren(...made);
}

function drawEnd(end, one, chat) { // what became of an answer, what it cost, and what can be done with it
  const made = [], last = chat.messages[chat.messages.length - 1] === one;
  const why = { stopped: one.content ? "stopped; what was said stays" : "stopped before its first word",
    length: `cut after ${whole(one.cost?.tokens ?? 0)} tokens; raise the limit under Settings, or let it go on`, failed: one.error }[one.finish];
  if (why) made.push(element("p", why, one.finish === "failed" ? "note bad" : "note why"));
  if (!one.content && !one.finish) made.push(element("p", "(the model said nothing)", "note"));
  if (one.cost) made.push(element("p", one.cost.said, "note"));
  const button = (name, act, label) => {
    const found = element("button", name, "small");
    found.type = "button";
    if (label) found.setAttribute("aria-label", label);
    found.addEventListener("click", () => act(found));
    made.push(found);
  };
  if (one.content) button("Copy", (found) => copied(one.content, found), "Copy this answer");
  if (last && one.content && ["stopped", "length"].includes(one.finish)) button("Go on", () => answerIn(chat, true), "Let this answer go on");
  if (last && one.finish === "failed") button("Try again", () => { chat.messages.pop(); answerIn(chat, false); });
  if (one.content && one.cost && requests.maps && one.cost.prompt <= requests.maps) {
    const before = sent(chat.messages.slice(0, chat.messages.indexOf(one)));
    button("Selection map", () => showMap({ messages: before, ...(one.policy ? { policy: one.policy } : {}), max_tokens: Math.min(33, Math.max(2, one.cost.tokens)) }, 0));
  }
  end.replaceChildren(...made);
}

function costOf(usage, first, all) {
  const cached = usage.prompt_tokens_details.cached_tokens, ours = usage.saccade, parts = [];
  parts.push(`${whole(usage.prompt_tokens)} tokens read` + (cached ? `, ${whole(cached)} of them kept from before` : ""), `${whole(usage.completion_tokens)} written`);
  if (first !== null) parts.push(`${first.toFixed(first < 10 ? 1 : 0)} s to the first, ${all.toFixed(all < 10 ? 1 : 0)} s in all`);
  if (ours.density.prefill !== null && ours.density.prefill < 0.9995) parts.push(`${percent(ours.density.prefill)} of the keys read in the prompt`);
  if (ours.density.decode !== null && ours.density.decode < 0.9995) parts.push(`${percent(ours.density.decode)} in the answer`);
  return { prompt: usage.prompt_tokens, tokens: usage.completion_tokens, said: [ours.policy, ...parts].join("; ") + (ours.notes.length ? `. ${ours.notes.join("; ")}` : "") };
}

async function answerIn(chat, goesOn) {
  const one = goesOn ? chat.messages[chat.messages.length - 1] : { role: "assistant", content: "", finish: null };
  const messages = sent(chat.messages), before = goesOn ? one.content : "", policy = at("policy").value.trim();
  if (!goesOn) chat.messages.push(one);
  delete one.error;
  Object.assign(one, { finish: null, cost: null, policy });
  const place = shownMessage(one, chat);
  if (goesOn) at("log").lastElementChild.replaceWith(place); else at("log").append(place);
  at("welcome").hidden = true;
  written = one;
  const mine = writing = new AbortController(), began = performance.now(), log = at("log");
  let first = null, due = 0;
  const draw = () => {
    const bottom = log.scrollHeight - log.scrollTop - log.clientHeight < 80, now = performance.now();
    drawAnswer(places.get(one).body, one);
    due = performance.now() + Math.max(80, 4 * (performance.now() - now)); // long answers take long to draw
    if (bottom) log.scrollTop = log.scrollHeight;
  };
  const tick = setInterval(() => {
    if (first !== null) return;
    const own = requests.running.find((each) => !each.output_tokens && each.prefill.tokens), passed = Math.round((performance.now() - began) / 1000);
    places.get(one).end.replaceChildren(element("p", own ? `reading ${whole(own.prefill.tokens + (own.cached_tokens || 0))} of ${whole(own.prompt_tokens)} tokens, ${passed} s`
      : `reading, ${passed} s`, "note"));
    log.scrollTop = log.scrollHeight;
  }, 1000);
  places.get(one).end.replaceChildren(element("p", "reading …", "note"));
  busy(true);
  log.scrollTop = log.scrollHeight;
  try {
    const heat = at("heatness").value, ask = { messages, max_tokens: Number(at("limit").value) || 2048, ...(policy ? { policy } : {}),
      ...(heat === "" ? {} : { temperature: Number(heat) }), ...(goesOn ? { continue_final_message: true, add_generation_prompt: false } : {}) };
    const got = await converse(ask, mine.signal, ({ text, thoughts }) => {
      if (first === null && (text || thoughts)) { first = (performance.now() - began) / 1000; places.get(one).end.replaceChildren(); }
      one.content = before + text;
      one.thoughts = thoughts || one.thoughts;
      if (performance.now() > due) draw();
    });
    one.finish = got.finish === "length" ? "length" : null;
    if (got.usage) one.cost = costOf(got.usage, first, (performance.now() - began) / 1000);
    spoken(one.finish === "length" ? "The answer was cut: its limit is reached." : "The answer is complete.");
  } catch (error) {
    one.finish = error.name === "AbortError" ? "stopped" : "failed";
    if (one.finish === "failed") one.error = error.message;
    spoken(one.finish === "stopped" ? "Stopped; what was said stays." : error.message, one.finish === "failed");
  }
  clearInterval(tick);
  if (writing === mine) { writing = null; busy(false); }
  if (!chats.includes(chat)) return; // it was deleted meanwhile
  chats = [chat, ...chats.filter((each) => each !== chat)];
  if (!keepChats()) spoken("The browser has no room to keep this conversation over a reload; delete others.", true);
  listChats();
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  draw();
  drawEnd(places.get(one).end, one, chat);
  if (chat.id === chosen && near) log.scrollTop = log.scrollHeight;
}

function busy(is) {
  at("halt").hidden = !is;
  at("send").hidden = is;
  at("log").setAttribute("aria-busy", String(is));
}

async function say() {
  const text = at("message").value.trim(), chat = current();
  if (writing || !chat || (!text && !attached.some((one) => one.text))) return;
  if (attached.some((one) => one.text === null)) { spoken("A document is still being read."); return; }
  const last = chat.messages[chat.messages.length - 1];
  chat.messages.push({ role: "user", content: text, ...(attached.length ? { documents: attached } : {}) });
  at("log").append(shownMessage(chat.messages[chat.messages.length - 1], chat));
  if (last && places.has(last)) drawEnd(places.get(last).end, last, chat); // it goes on no more
  at("message").value = "";
  attached = [];
  showAttached();
  fit();
  spoken("");
  keepChats();
  await answerIn(chat, false);
  at("message").focus();
}

const documentLine = (one) => one.text === null ? `${one.name}: it is being read …` : `${one.name}, ${one.tokens ? `${whole(one.tokens)} tokens` : `${whole(one.text.length)} characters`}`;

function showAttached() {
  at("attached").replaceChildren(...attached.map((one) => {
    const line = element("li", documentLine(one), "paper"), gone = element("button", "Remove", "small");
    gone.type = "button";
    gone.setAttribute("aria-label", `Remove ${one.name}`);
    gone.addEventListener("click", () => { attached = attached.filter((each) => each !== one); showAttached(); });
    line.append(gone);
    return line;
  }));
}

async function attach(files) {
  for (const file of files) {
    const one = { name: file.name, text: null, tokens: null }, mine = chosen;
    attached.push(one);
    showAttached();
    try {
      one.text = await textOf(file);
      const found = await tokensOf(one.text);
      one.tokens = found?.count ?? null;
      if (mine === chosen) spoken(found && found.count > found.most ? `${one.name} has ${whole(found.count)} tokens, and the model reads ${whole(found.most)}; give a part of it.` : `${documentLine(one)}; it goes with your next message.`,
        Boolean(found && found.count > found.most));
    } catch (error) {
      attached = attached.filter((each) => each !== one);
      if (mine === chosen) spoken(error.message, true);
    }
    showAttached();
  }
}

function fit() { // the message's box is as high as what is in it
  const box = at("message");
  box.rows = Math.min(12, Math.max(2, box.value.split("\n").length));
}

at("talk").addEventListener("submit", (event) => { event.preventDefault(); say(); });
at("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); say(); }
});
at("message").addEventListener("input", fit);
at("chat").addEventListener("keydown", (event) => { if (event.key === "Escape" && writing) { writing.abort(); at("message").focus(); } });
at("halt").addEventListener("click", () => { writing?.abort(); at("message").focus(); });
at("newchat").addEventListener("click", () => { begin(); at("message").focus(); });
at("papers").addEventListener("change", () => { attach([...at("papers").files]); at("papers").value = ""; });
at("pick").addEventListener("click", () => at("papers").click());
for (const kind of ["dragover", "dragleave", "drop"]) at("talk").addEventListener(kind, (event) => {
  if (!event.dataTransfer?.types.includes("Files")) return;
  event.preventDefault();
  at("talk").classList.toggle("over", kind === "dragover");
  if (kind === "drop") attach([...event.dataTransfer.files]);
});
addEventListener("pagehide", () => { // what came so far stays
  if (!writing) return;
  written.finish = "stopped";
  keepChats();
});
addEventListener("storage", (event) => { // another window of this page has kept something
  if (event.key !== KEPT_AS || writing) return;
  try { chats = JSON.parse(event.newValue || "[]"); } catch { return; }
  if (!current()) begin(); else { listChats(); showChat(); }
});
at("chatlist").open = innerWidth > 700;
if (chats.length) choose(chats[0].id); else begin();
