// The server now, and how long its clients wait: all of it out of /metrics.
const EVERY = 2000, KEPT = 60; // ms between two looks; looks that are drawn
const past = { speed: [], running: [], waiting: [] };
let before = null;

// Samples of Prometheus' text: name without "saccade:" -> list of [labels, value].
function samples(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const parts = line.match(/^saccade:(\w+)(?:\{(.*)\})? (\S+)$/);
    if (!parts) continue;
    const labels = Object.fromEntries([...(parts[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((one) => [one[1], one[2]]));
    (found[parts[1]] ??= []).push([labels, Number(parts[3])]);
  }
  return found;
}

const total = (found, name) => (found[name] || []).reduce((sum, [, value]) => sum + value, 0);
const share = (part, of) => of ? part / of : null;

function draw(found, now) {
  const made = total(found, "generation_tokens_total"), running = total(found, "num_requests_running");
  const waiting = total(found, "num_requests_waiting");
  const speed = before ? Math.max(0, 1000 * (made - before.made) / (now - before.now)) : null;
  before = { made, now };
  at("running").textContent = running;
  at("waiting").textContent = waiting;
  if (speed !== null) at("speed").textContent = speed.toFixed(0);
  at("pool").textContent = percent(total(found, "kv_cache_usage_perc"));
  const tiers = found.kv_cache_bytes || [];
  at("tier").textContent = tiers.map(([labels]) => labels.tier).join(" + ") || "by tier";
  at("bytes").textContent = tiers.map(([, value]) => bytes(value)).join(" + ") || "–";
  at("hits").textContent = percent(share(total(found, "prefix_cache_hits_total"), total(found, "prefix_cache_queries_total")));
  at("density").textContent = percent(share(total(found, "keys_attended_total"), total(found, "keys_causal_total")));
  at("coverage").textContent = percent(share(total(found, "coverage_estimated_sum"), total(found, "coverage_estimated_count")));
  for (const [name, value] of Object.entries({ speed: speed ?? 0, running, waiting })) {
    past[name].push(value);
    if (past[name].length > KEPT) past[name].shift();
  }
  trace("speeds", [past.speed], "tokens a second");
  trace("queue", [past.running, past.waiting], "requests", ["running", "waiting"]);
  for (const name of ["time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"])
    histogram(name, found[name + "_bucket"] || []);
}

function trace(place, lines, unit, names) {
  const most = Math.max(1, ...lines.flat()), last = lines.map((line) => line[line.length - 1]);
  const said = names ? last.map((value, i) => value + " " + names[i]).join(", ") : last[0].toFixed(0) + " " + unit;
  const svg = shape("svg", { viewBox: "0 0 500 100", role: "img", "aria-label": `now ${said}; at most ${most.toFixed(0)}` });
  svg.append(shape("line", { x1: 0, y1: 90, x2: 500, y2: 90, class: "axis" }));
  lines.forEach((line, number) => {
    const points = line.map((value, i) => `${(500 * (KEPT - line.length + i + 1) / KEPT).toFixed(1)},${(90 - 74 * value / most).toFixed(1)}`);
    svg.append(shape("polyline", { points: points.join(" "), class: "trace", "stroke-dasharray": number ? "4 3" : "none" }));
  });
  svg.append(shape("text", { x: 2, y: 11 }, `at most ${most.toFixed(0)}${names ? "; waiting is dashed" : ""}`));
  at(place).replaceChildren(svg);
}

// Bars of a histogram whose buckets add up, and its percentiles.
function histogram(name, buckets) {
  const ends = {};
  for (const [labels, value] of buckets) ends[labels.le] = (ends[labels.le] || 0) + value;
  const rows = Object.entries(ends).map(([end, value]) => [end === "+Inf" ? Infinity : Number(end), value]).sort((a, b) => a[0] - b[0]);
  const count = rows.length ? rows[rows.length - 1][1] : 0;
  if (!count) { at(name).replaceChildren(element("p", "nobody has waited yet", "note")); return; }
  const each = rows.map(([end, value], i) => [end, value - (i ? rows[i - 1][1] : 0)]);
  const first = each.findIndex(([, value]) => value), last = each.findLastIndex(([, value]) => value);
  const seen = each.slice(Math.max(0, first - 1), last + 2), most = Math.max(...seen.map(([, value]) => value));
  const at_least = (part) => rows.find(([, value]) => value >= part * count)[0];
  const limit = (part) => { const end = at_least(part); return end === Infinity ? "more than all" : "≤ " + seconds(end); };
  const said = `${whole(count)} in all; half ${limit(0.5)}, 90 % ${limit(0.9)}, 99 % ${limit(0.99)}`;
  const wide = 300 / seen.length, svg = shape("svg", { viewBox: "0 0 300 95", role: "img", "aria-label": said });
  seen.forEach(([end, value], i) => {
    const high = 70 * value / most, label = end === Infinity ? "more" : seconds(end);
    svg.append(shape("rect", { x: wide * i + 1, y: 75 - high, width: wide - 2, height: high, class: "bar" },
      shape("title", {}, `${label === "more" ? label : "≤ " + label}: ${whole(value)}`)));
    if (seen.length < 7 || i % Math.ceil(seen.length / 5) === 0) svg.append(shape("text", { x: wide * i + 1, y: 90 }, label));
  });
  svg.append(shape("line", { x1: 0, y1: 75, x2: 300, y2: 75, class: "axis" }));
  at(name).replaceChildren(svg, element("p", said, "note"));
}

async function look() {
  if (document.hidden) return;
  try {
    draw(samples(await get("/metrics")), performance.now());
    showRequests(await get("/v1/requests"));
    if (!at("model").dataset.known) {
      const model = (await get("/v1/models")).data[0];
      at("model").textContent = `${model.id}, ${whole(model.max_model_len)} tokens, by default ${model.policy}`;
      at("model").dataset.known = model.max_model_len;
    }
  } catch (error) {
    if (error.message.includes("API key") && at("model").textContent !== error.message) document.querySelector(".settings").open = true; // it is given there
    at("model").textContent = error.message;
    delete at("model").dataset.known;
    before = null;
  }
}
