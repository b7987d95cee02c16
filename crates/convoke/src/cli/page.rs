//! The parts of a page of `--report`: one self-contained HTML file.

use convoke_files::escaped;

use crate::Isa;

use super::system;

/// A narrow screen shows this many columns of a table beside each other.
const MOST_COLUMNS: usize = 4;
/// Cells of more letters, such as `15.3 ms to 16.0 ms`, take several lines on a narrow screen.
const LONG: usize = 12;
const STYLE: &str = include_str!("report.css");

/// A whole page with this title, style and footer included.
pub(crate) fn document(title: &str, body: &str) -> String {
    let title = escape(title);
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>convoke: {title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <h1>{title}</h1>\n{body}<footer>convoke {version}</footer>\n</body>\n</html>\n"
    )
}

/// Where, when and by which command a page was made, and with which settings: name and value of each.
pub(crate) fn provenance(settings: &[(&str, String)]) -> String {
    let mut rows: Vec<Vec<String>> =
        settings.iter().map(|(name, value)| vec![(*name).to_owned(), value.clone()]).collect();
    let own = [
        ("CPU", system::cpu_name().unwrap_or_else(|| "unknown".into())),
        ("instruction set", Isa::detect().to_string()),
        ("date", system::now()),
        ("version", env!("CARGO_PKG_VERSION").into()),
    ];
    rows.extend(own.into_iter().map(|(name, value)| vec![name.to_owned(), value]));
    let words = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>();
    let command = shlex::try_join(words.iter().map(String::as_str)).unwrap_or_else(|_| words.join(" "));
    format!("<h2>Made with</h2>\n{}\n<pre>{}</pre>\n", values(rows), escape(&command))
}

/// A table of names and values, without a heading.
pub(crate) fn values(rows: Vec<Vec<String>>) -> String {
    table(&[vec![vec![String::new(); 2]], rows].concat())
}

/// The cells as HTML; a single run needs no heading. Cells that list something may take several lines.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let (head, body) = rows.split_first().expect("a table has a heading");
    // On a narrow screen each row of a wide table is a list, so its cells tell what they are.
    let is_wide = head.len() > MOST_COLUMNS;
    // A name like fused/separate may be broken where it is narrow.
    let text = |cell: &String| escape(cell).replace('/', "/<wbr>");
    let value = |(name, cell): (&String, &String)| {
        let class = match (cell.contains(", "), cell.chars().count() > LONG) {
            (true, _) => " class=\"list\"",
            (false, true) => " class=\"long\"",
            (false, false) => "",
        };
        let name = if is_wide { format!(" data-name=\"{}\"", escape(name)) } else { String::new() };
        format!("<td{class}{name}>{}</td>", text(cell))
    };
    let row = |row: &Vec<String>| {
        let values: String = head.iter().zip(row).skip(1).map(value).collect();
        // So may one like layer2.0.conv1.
        format!("<tr><th>{}</th>{values}</tr>\n", text(&row[0]).replace('.', ".<wbr>"))
    };
    let body: String = body.iter().map(row).collect();
    let heading = |cell: &String| format!("<th>{}</th>", text(cell));
    let head = match head.len() {
        2 => String::new(),
        _ => format!("<thead><tr>{}</tr></thead>\n", head.iter().map(heading).collect::<String>()),
    };
    let class = if is_wide { " class=\"wide\"" } else { "" };
    // `tabindex` lets the table take the focus, so that keys can scroll it.
    format!(
        "<div class=\"table\" tabindex=\"0\"><table{class}>\n{head}<tbody>\n{body}</tbody>\n</table></div>"
    )
}

/// Parts of a page that stand beside each other on wide screens; empty ones are left out.
pub(crate) fn columns(parts: &[String]) -> String {
    let parts: Vec<String> = parts
        .iter()
        .filter(|part| !part.is_empty())
        .map(|part| format!("<section>\n{part}</section>\n"))
        .collect();
    match parts.len() {
        0 => String::new(),
        _ => format!("<div class=\"columns\">\n{}</div>", parts.concat()),
    }
}

pub(crate) fn legend(entries: impl Iterator<Item = (String, String)>) -> String {
    let entry = |(class, text)| format!("<li><i class=\"{class}\"></i>{text}</li>");
    format!("<ul>{}</ul>", entries.map(entry).collect::<String>())
}

/// Escapes text for HTML; characters that browsers would not show are written out.
pub(crate) fn escape(text: &str) -> String {
    let text = escaped(text).to_string();
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
