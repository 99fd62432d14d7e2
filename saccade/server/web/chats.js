// Conversations, which this browser keeps: [{ id, title, messages }], the one that was used last first. A message has a
// role and its content; of the user also documents [{ name, text, tokens }]; of the model what its end was, and its cost.
const KEPT_AS = "saccade.chats", MOST_CHATS = 50;
const deleted = new Set();

function storedChats() { // none where the browser keeps nothing
  try {
    const found = JSON.parse(localStorage.getItem(KEPT_AS) || "[]");
    return Array.isArray(found) ? found.filter((one) => one && typeof one.id === "string" && Array.isArray(one.messages)) : [];
  } catch { return []; }
}

let chats = storedChats();

const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (one) => one.toString(16).padStart(2, "0")).join("");

function keepChats() { // whether there was room
  const others = storedChats().filter((one) => !deleted.has(one.id) && !chats.some((each) => each.id === one.id)); // of another window
  const some = [...chats, ...others].filter((one) => one.messages.length).slice(0, MOST_CHATS);
  try {
    localStorage.setItem(KEPT_AS, JSON.stringify(some));
    return true;
  } catch { return false; }
}

function titled(chat) {
  const first = chat.messages.find((one) => one.role === "user");
  return !first ? "New conversation" : (first.content || first.documents?.[0]?.name || "").replace(/\s+/g, " ").slice(0, 60) || "Untitled";
}

// What is sent: documents before what was asked about them; questions that had no answer are left out, but the last one.
function sent(messages) {
  const out = [];
  messages.forEach((one, at) => {
    if (one.role === "user") {
      if (at + 1 < messages.length && messages[at + 1].role === "assistant" && !messages[at + 1].content && at + 2 < messages.length) return;
      out.push({ role: "user", content: [...(one.documents || []).map((each) => each.text), one.content].filter(Boolean).join("\n\n") });
    } else if (one.content) out.push({ role: "assistant", content: one.content });
  });
  return out;
}
