"use strict";
const element = (id) => document.getElementById(id);
let talk = [];
let asking = null;

const headers = () => {
  const key = element("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
};

const show = (role, text) => {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  element("talk").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
};

const busy = (is) => {
  element("send").disabled = is;
  element("stop").disabled = !is;
};

// Calls `piece` with every event of a stream; a line may arrive in parts.
const read = async (body, piece) => {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") piece(JSON.parse(line.slice(6)));
    }
  }
};

const ask = async (text) => {
  element("trouble").textContent = "";
  talk.push({ role: "user", content: text });
  show("user", text);
  const item = show("assistant", "");
  asking = new AbortController();
  busy(true);
  try {
    const temperature = Number(element("temperature").value);
    const max_tokens = Math.max(1, Math.floor(Number(element("tokens").value)) || 512);
    const body = JSON.stringify({ messages: talk, stream: true, temperature, max_tokens });
    const reply = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body, signal: asking.signal });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    await read(reply.body, (event) => {
      if (event.error) throw new Error(event.error.message);
      item.textContent += event.choices[0]?.delta?.content ?? "";
      item.scrollIntoView({ block: "end" });
    });
  } catch (error) {
    if (error.name !== "AbortError") element("trouble").textContent = error.message;
  }
  busy(false);
  if (item.textContent) talk.push({ role: "assistant", content: item.textContent });
  else { item.remove(); }
};

element("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("text").value;
  if (!text.trim() || element("send").disabled) return;
  element("text").value = "";
  ask(text);
});
element("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  element("ask").requestSubmit();
});
element("stop").addEventListener("click", () => asking?.abort());
element("clear").addEventListener("click", () => {
  asking?.abort();
  talk = [];
  element("talk").replaceChildren();
});
fetch("/v1/models", { headers: headers() })
  .then((reply) => (reply.ok ? reply.json() : null))
  .then((list) => { if (list) element("model").textContent = list.data[0].id; })
  .catch(() => {});
