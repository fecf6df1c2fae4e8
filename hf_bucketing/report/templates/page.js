// A click on a column's head sorts its table: by number where the cells hold numbers, or else by text.
document.querySelectorAll("thead button").forEach(button => button.addEventListener("click", () => {
  const head = button.parentElement, table = head.closest("table"), body = table.tBodies[0]
  const down = head.getAttribute("aria-sort") === "ascending"
  table.querySelectorAll("th[aria-sort]").forEach(one => one.removeAttribute("aria-sort"))
  head.setAttribute("aria-sort", down ? "descending" : "ascending")
  const key = row => row.cells[head.cellIndex].textContent
  const value = row => parseFloat(key(row).replaceAll(",", "").replace("–", "-Infinity"))
  const compare = (a, b) => head.classList.contains("number")
    ? value(a) - value(b) : key(a).localeCompare(key(b), undefined, { numeric: true })
  body.append(...[...body.rows].sort((a, b) => (down ? -1 : 1) * compare(a, b)))
}))
