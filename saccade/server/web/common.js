"use strict";
const at = (id) => document.getElementById(id);
const headers = () => Object.assign({ "content-type": "application/json" },
  at("key").value ? { authorization: "Bearer " + at("key").value } : {});
const percent = (value) => value === null || value === undefined ? "–"
  : (100 * value).toFixed(value > 0 && value < 0.01 ? 2 : 1) + " %";
const whole = (value) => value.toLocaleString("en");

async function get(path) { // JSON or text of this server; an Error that says what is wrong
  const answer = await fetch(path, { headers: headers() });
  if (!answer.ok) throw new Error(answer.status === 401 ? "the server wants an API key" : "status " + answer.status);
  return answer.headers.get("content-type").startsWith("application/json") ? answer.json() : answer.text();
}

function seconds(value) {
  return value < 0.001 ? (1e6 * value).toFixed(0) + " µs" : value < 1 ? Number((1000 * value).toPrecision(3)) + " ms"
    : Number(value.toPrecision(3)) + " s";
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < 4) { value /= 1024; unit++; }
  return Number(value.toPrecision(3)) + " " + units[unit];
}

// An element of SVG; attributes are no styles, which the page's policy would refuse.
function shape(name, attributes, ...inside) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
}

function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

// From light to dark blue, by the square root of a share: sparse heads differ at its low end.
function shade(share) {
  const part = Math.sqrt(Math.max(0, Math.min(1, share)));
  const mix = [[239, 243, 248], [96, 158, 208], [8, 48, 107]], place = 2 * part, left = Math.min(1, Math.floor(place));
  return "rgb(" + mix[left].map((value, i) => Math.round(value + (mix[left + 1][i] - value) * (place - left))).join() + ")";
}

// Choices of a select; the one that was chosen stays where it can.
function offer(select, choices) {
  const before = select.value;
  if (select.dataset.offered !== JSON.stringify(choices)) {
    select.replaceChildren(...choices.map(([value, text]) => {
      const option = element("option", text);
      option.value = value;
      return option;
    }));
    select.dataset.offered = JSON.stringify(choices);
    if (choices.some(([value]) => value === before)) select.value = before;
  }
}
