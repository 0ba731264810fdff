// A chat as a Markdown file: the browser is the only place where it is kept, and a file can go anywhere.

import { contentOf } from "./attachments.js";

// The path that is shown, without pictures and thoughts.
function toMarkdown({ title, conversation }) {
  const parts = conversation.path.map((message) => {
    const isAnswer = message.role === "assistant";
    const text = isAnswer ? message.text : contentOf({ ...message, pictures: [] });
    return `## ${isAnswer ? "Model" : "You"}\n\n${text}\n`;
  });
  return `# ${title}\n\n${parts.join("\n")}`;
}

export function download(chat) {
  const url = URL.createObjectURL(new Blob([toMarkdown(chat)], { type: "text/markdown" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = `${chat.title.replace(/[^\p{L}\p{N} ._-]+/gu, "").trim() || "chat"}.md`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000); // the browser has begun to read it by then
}
