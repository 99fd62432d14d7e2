// Density by layer and head of a request that runs or has ended.
let requests = { running: [], ended: [] };

function showRequests(found) {
  requests = { running: found.running ?? requests.running, ended: found.ended, maps: found.selection_map_tokens };
  const all = [...requests.running, ...requests.ended];
  const name = (one) => `${one.finish_reason === null ? "running" : "ended"}: ${one.policy}, ${whole(one.prompt_tokens)} + ${whole(one.output_tokens)} tokens (${one.id.slice(0, 8)})`;
  offer(at("request"), all.length ? [["", "the latest"], ...all.map((one) => [one.id, name(one)])] : [["", "none yet"]]);
  drawHeat();
}

function contradicted(found) {
  const where = found.layer === null ? "over all layers" : `in layer ${found.layer}` + (found.kv_head === null ? "" : ` KV head ${found.kv_head}`);
  return `An audit contradicts the estimate ${where}: ${percent(found.estimated)} was estimated, ${percent(found.mean)} measured.`;
}

function drawHeat() {
  const all = [...requests.running, ...requests.ended], chosen = all.find((one) => one.id === at("request").value) ?? all[0];
  const place = at("heat"), said = at("heatsaid");
  if (!chosen) { place.replaceChildren(); said.textContent = "No request of yours has run yet."; return; }
  let phase = at("phase").value;
  const other = phase === "decode" ? "prefill" : "decode";
  if (!chosen[phase].tokens && chosen[other].tokens) phase = other;
  const stats = chosen[phase], rows = stats.density_per_head, heads = rows.length ? rows[0].length : 0;
  if (!heads) { place.replaceChildren(); said.textContent = `Nothing was computed in ${phase}: it was cached.`; return; }
  let most = [-1, 0, 0], least = [2, 0, 0];
  rows.forEach((row, layer) => row.forEach((value, head) => {
    if (value > most[0]) most = [value, layer, head];
    if (value < least[0]) least = [value, layer, head];
  }));
  said.textContent = `${chosen.finish_reason === null ? "Running" : "Ended"}, ${chosen.policy}, ${phase}: ${percent(stats.density)} of dense`
    + (stats.coverage_estimated === null ? "" : `, by the method's estimate ${percent(stats.coverage_estimated)} of the attention weight`)
    + `, ${whole(Math.round(stats.keys_read_per_token))} keys a token. Most: layer ${most[1]} head ${most[2]}, ${percent(most[0])};`
    + ` least: layer ${least[1]} head ${least[2]}, ${percent(least[0])}.`
    + (chosen.contradiction === null ? "" : ` ${contradicted(chosen.contradiction)}`);
  const size = heads > 24 ? 14 : 24, left = 58, high = rows.length * size + 46;
  const wide = Math.max(left + heads * size + 4, left + 266);
  const svg = shape("svg", { viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": said.textContent });
  rows.forEach((row, layer) => {
    if (rows.length < 17 || layer % 4 === 0) svg.append(shape("text", { x: 2, y: 18 + layer * size + size / 2 + 4 }, `layer ${layer}`));
    row.forEach((value, head) => svg.append(shape("rect", { x: left + head * size, y: 18 + layer * size, width: size - 1,
      height: size - 1, fill: shade(value) }, shape("title", {}, `layer ${layer} head ${head}: ${percent(value)}`))));
  });
  for (let head = 0; head < heads; head += heads > 12 ? 4 : 1) svg.append(shape("text", { x: left + head * size + 2, y: 12 }, head));
  [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1].forEach((value, i) => {
    svg.append(shape("rect", { x: left + i * 38, y: high - 24, width: 37, height: 8, fill: shade(value) }));
    svg.append(shape("text", { x: left + i * 38, y: high - 4 }, 100 * value + " %"));
  });
  svg.style.maxWidth = wide + "px";
  place.replaceChildren(svg);
}

at("request").addEventListener("change", drawHeat);
at("phase").addEventListener("change", drawHeat);
