// One answer of /v1/chat/completions, as it comes.
async function converse(body, signal, told) {
  const answer = { text: "", thoughts: "", usage: null, finish: null };
  const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), signal,
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }) });
  if (!response.ok) throw new Error(await reason(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "", part; !(part = await reader.read()).done;) {
    const lines = (held + part.value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      if (event.usage) answer.usage = event.usage;
      for (const choice of event.choices) {
        answer.text += choice.delta.content ?? "";
        answer.thoughts += choice.delta.reasoning ?? "";
        answer.finish = choice.finish_reason ?? answer.finish;
        told(answer);
      }
    }
  }
  return answer;
}

async function reason(response) { // what an answer that is none says of it, in one line
  try { return (await response.json()).error.message; } catch { return "the server answered with status " + response.status; }
}

// The text of a file, which the server makes of it.
async function textOf(file) {
  const data = await new Promise((done, failed) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => done(reader.result.slice(reader.result.indexOf(",") + 1)));
    reader.addEventListener("error", () => failed(new Error(`${file.name} cannot be read`)));
    reader.readAsDataURL(file);
  });
  if (!file.size) throw new Error(`${file.name} is empty; give a document with some text`);
  const response = await fetch("/v1/documents", { method: "POST", headers: headers(), body: JSON.stringify({ name: file.name, data }) });
  if (!response.ok) throw new Error(await reason(response));
  return (await response.json()).text;
}

async function tokensOf(text) { // how many, and how many a model reads; null where the server does not say
  try {
    const answer = await fetch("/tokenize", { method: "POST", headers: headers(), body: JSON.stringify({ prompt: text }) });
    if (!answer.ok) return null;
    const found = await answer.json();
    return { count: found.count, most: found.max_model_len };
  } catch { return null; }
}
