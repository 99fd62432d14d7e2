// The selection map of an answer: what each head read, over the attention it would have paid when dense.
const INK = { read: [[191, 217, 240], [8, 33, 97]], unread: [[247, 242, 230], [219, 56, 33]] };
let drawn = null, mapper = null;

const grid = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

async function showMap(ask, number) {
  at("mapped").hidden = false;
  at("mapsaid").className = "note";
  at("mapsaid").textContent = "The prompt is computed anew, with somebody looking on …";
  at("heads").replaceChildren();
  at("mapped").scrollIntoView({ block: "nearest" });
  if (mapper) mapper.abort();
  const mine = mapper = new AbortController();
  try {
    const answer = await fetch("/v1/selection_maps", { method: "POST", headers: headers(), body: JSON.stringify(ask), signal: mine.signal });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error.message);
    drawn = { ...found, policy: ask.policy, number };
    const layers = [...new Set(found.maps.map((one) => one.layer))], few = found.maps[0].heads * layers.length <= 32;
    offer(at("maplayer"), [...(few && layers.length > 1 ? [["all", "all layers"]] : []), ...layers.map((layer) => [String(layer), `layer ${layer}`])]);
    drawMap();
  } catch (error) {
    if (error.name === "AbortError") return;
    at("mapsaid").className = "bad";
    at("mapsaid").textContent = error.message;
  }
}

function drawMap() {
  if (!drawn) return;
  const phase = at("mapphase").value, layer = at("maplayer").value;
  const chosen = drawn.maps.filter((map) => map.phase === phase && (layer === "all" || map.layer === Number(layer)));
  if (!chosen.length) { at("heads").replaceChildren(element("p", "the answer had one token: no decode step", "note")); return; }
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const both = ["density", "mass"].map((name) => percent(mean(chosen.flatMap((map) => map[name]))));
  at("mapsaid").textContent = `${drawn.policy}, ${layer === "all" ? "all layers" : "layer " + layer}, ${phase}: heads read ${both[0]} of the keys on average, and keep ${both[1]} of true attention. ${whole(drawn.tokens)} tokens; a cell is ${drawn.cell} keys wide.`;
  at("heads").replaceChildren(...chosen.flatMap((map) => panels(map, phase)));
}

function panels(one, phase) {
  const [read, unread, share] = [grid(one.read), grid(one.unread), grid(one.share)], size = one.rows * one.columns;
  return one.density.map((density, head) => {
    const canvas = document.createElement("canvas"), figure = element("figure");
    canvas.width = one.columns; canvas.height = one.rows;
    const context = canvas.getContext("2d"), image = context.createImageData(one.columns, one.rows);
    for (let i = 0, from = head * size; i < size; i++, from++) {
      const covered = share[from], part = Math.sqrt(covered / 254), ink = read[from] >= unread[from] ? INK.read[1] : INK.unread[1];
      const weight = Math.max(read[from], unread[from]) / 255;
      for (let colour = 0; colour < 3; colour++) {
        const ground = INK.unread[0][colour] + (INK.read[0][colour] - INK.unread[0][colour]) * part;
        image.data[4 * i + colour] = covered === 255 ? 255 : ground + (ink[colour] - ground) * weight;
      }
      image.data[4 * i + 3] = 255;
    }
    context.putImageData(image, 0, 0);
    const said = `layer ${one.layer} head ${head}: reads ${percent(density)}, keeps ${percent(one.mass[head])}`;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", said);
    canvas.style.aspectRatio = phase === "prefill" ? "1" : "3";
    figure.append(canvas, element("figcaption", said));
    return figure;
  });
}

at("maplayer").addEventListener("change", drawMap);
at("mapphase").addEventListener("change", drawMap);
