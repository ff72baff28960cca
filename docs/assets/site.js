// In Chinese, the end of a line in the source is no space.
if (location.pathname.endsWith(".zh.html")) {
  document.documentElement.lang = "zh";
  const texts = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
  const ends = /(?<=[，。；：、（）])\n|(?<=[\u3000-\u9fff\uff00-\uffef])\n(?=[\u3000-\u9fff\uff00-\uffef])/g;
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replace(ends, "");
}

// In tables, names and options stay in one piece: code breaks at its spaces only, not at hyphens (see site.css).
for (const code of document.querySelectorAll("td code")) {
  code.innerHTML = code.innerHTML.replace(/\S+/g, "<span>$&</span>");
}
