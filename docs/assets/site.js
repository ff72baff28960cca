if (location.pathname.endsWith(".zh.html")) document.documentElement.lang = "zh";

// In tables, names and options stay in one piece: code breaks at its spaces only, not at hyphens (see site.css).
for (const code of document.querySelectorAll("td code")) {
  code.innerHTML = code.innerHTML.replace(/\S+/g, "<span>$&</span>");
}
