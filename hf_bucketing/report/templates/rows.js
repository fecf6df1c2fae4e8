// Texts of rows become text nodes, so that no caption or name of a file is read as HTML.
const filters = document.getElementById("filters"), list = document.getElementById("rows"), perPage = 48
let first = 0

const make = (name, text, ...parts) => {
  const element = document.createElement(name)
  element.append(...(text ? [text] : []), ...parts)
  return element
}

const card = row => {
  const pictures = make("div")
  pictures.className = "pictures"
  for (const [label, file, width, height] of row.pictures) {
    const image = document.createElement("img")
    Object.assign(image, { width, height, alt: `${label} of ${row.texts.file[0]}` })
    image.src = `${list.dataset.pictures}/${file}`
    pictures.append(make("figure", "", image, make("figcaption", label)))
  }
  const texts = Object.entries(row.texts).filter(([label, lines]) => label !== "file" && lines.length)
  if (row.number !== null) texts.unshift(["row", [row.number.toLocaleString("en")]])
  if (row.differences.length) texts.push(["changes", row.differences])
  if (row.fault) texts.push(["fault", [row.fault]])
  const facts = texts.flatMap(([label, lines]) => [make("dt", label), make("dd", lines.join("\n"))])
  const article = make("article", "", pictures, make("h3", row.texts.file[0]), make("dl", "", ...facts))
  article.className = row.filters.change ? "changed" : ""
  return article
}

const show = () => {
  const { text, ...wanted } = Object.fromEntries(new FormData(filters))
  const words = text.toLowerCase().split(/\s+/)
  const fitting = rows.filter(row => Object.entries(wanted).every(([name, value]) => !value || row.filters[name] === value)
    && words.every(word => row.search.includes(word)))
  first = Math.max(0, Math.min(first, fitting.length - 1))
  first -= first % perPage
  const last = Math.min(first + perPage, fitting.length)
  const count = number => number.toLocaleString("en")
  document.getElementById("shown").textContent = fitting.length
    ? `${count(first + 1)}–${count(last)} of ${count(fitting.length)}` : "No row fits."
  document.getElementById("before").disabled = !first
  document.getElementById("after").disabled = last === fitting.length
  list.replaceChildren(...fitting.slice(first, last).map(card))
}

rows.forEach(row => { row.search = Object.values(row.texts).flat().join("\n").toLowerCase() })
filters.addEventListener("input", () => { first = 0; show() })
filters.addEventListener("submit", event => event.preventDefault())
document.getElementById("before").addEventListener("click", () => { first -= perPage; show() })
document.getElementById("after").addEventListener("click", () => { first += perPage; show() })
show()
