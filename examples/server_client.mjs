// A server's answers through openai-node: start `saccade serve` first, and npm install openai.
import OpenAI from "openai";

const [url = "http://localhost:8000/v1", key = "none"] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: key });
const model = (await client.models.list()).data[0].id;
const text = "The secret password of the lighthouse keeper is 7391-XKQ. "
  + "Rain fell, and nobody spoke of the storm. ".repeat(40) + "The secret password of the lighthouse keeper is";

for (const policy of ["dense", "psa"]) {
  const stream = await client.completions.create({ model, prompt: text, max_tokens: 9, temperature: 0, stream: true,
    stream_options: { include_usage: true }, policy });
  let said = "", usage = null;
  for await (const chunk of stream) {
    said += chunk.choices[0]?.text ?? "";
    usage = chunk.usage ?? usage;
  }
  console.log(policy, JSON.stringify(said), usage.saccade.density.decode.toFixed(3));
}
const messages = [{ role: "user", content: text }];
const chat = await client.chat.completions.create({ model, messages, max_tokens: 9, temperature: 0 });
console.log("chat", JSON.stringify(chat.choices[0].message.content), chat.choices[0].finish_reason);
const stream = client.responses.stream({ model, input: text, max_output_tokens: 9, temperature: 0 });
console.log("response", JSON.stringify((await stream.finalResponse()).output_text));
try {
  await client.chat.completions.create({ model: "another", messages });
} catch (error) {
  console.log("error", error.status, error.code);
}
