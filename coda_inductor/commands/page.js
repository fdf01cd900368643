// Opens what a link leads to, and everything around it; without this script the page reads the same.
function reveal() {
  let here = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const target = here;
  while (here) {
    if (here.tagName === "DETAILS") here.open = true;
    here = here.parentElement;
  }
  if (target) target.scrollIntoView();
}
addEventListener("hashchange", reveal);
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='#']");
  if (link && link.getAttribute("href") === location.hash) reveal();
  const button = event.target.closest("button[data-open]");
  if (button) document.querySelectorAll("details").forEach((d) => (d.open = Boolean(button.dataset.open)));
});
reveal();
