//! Downloads of files whose size and SHA-256 are known beforehand: several mirrors, resumable, atomic.
//!
//! A file grows under the name `NAME.part` and takes its own name only when its SHA-256 is right, so a file that has its name can
//! be trusted. An interrupted download is continued, from the same mirror or another one.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use convoke_files::{append, create_anew, create_folder, open_regular, sync_folder};
use sha2::{Digest, Sha256};
use ureq::http::{StatusCode, header};
use ureq::{Agent, Proxy};

use super::progress::report;
use super::{DataError, MirrorFailure, Progress, ProgressEvent, ProgressUnit};

/// Requests to one mirror for one file; a further one follows only if the last one brought something new.
const TRIES_PER_MIRROR: usize = 8;
/// The least time between two reports of progress.
const REPORT_INTERVAL: Duration = Duration::from_millis(20);

/// A file to download.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteFile<'a> {
    /// The name, on the mirrors and in the folder.
    pub name: &'a str,
    /// The exact size in bytes; no more than this is ever written.
    pub size: u64,
    /// The SHA-256 of the contents, in lower-case hexadecimal digits.
    pub sha256: &'a str,
}

/// Where to download from, and how long to wait.
#[derive(Clone, Debug)]
pub struct DownloadOptions {
    /// Addresses of folders that hold the files, tried in this order. `http` will do: contents are checked.
    pub mirrors: Vec<String>,
    /// A proxy such as `http://localhost:3128`; `None` connects directly. The environment is not read.
    pub proxy: Option<String>,
    /// The longest wait for a name to resolve, and again for a connection.
    pub connect_timeout: Duration,
    /// The longest wait for a response to begin, and for any further piece of it.
    pub read_timeout: Duration,
}

impl DownloadOptions {
    /// Options with these mirrors, no proxy, 10 s to connect, 30 s to read.
    pub fn new<M: Into<String>>(mirrors: impl IntoIterator<Item = M>) -> Self {
        Self {
            mirrors: mirrors.into_iter().map(Into::into).collect(),
            proxy: None,
            connect_timeout: Duration::from_secs(10),
            read_timeout: Duration::from_secs(30),
        }
    }

    fn agent(&self) -> Result<Agent, DataError> {
        let proxy =
            self.proxy.as_deref().map(Proxy::new).transpose().map_err(|error| DataError::Setting {
                field: "proxy",
                expected: "an address such as http://localhost:3128".to_owned(),
                found: format!("{} ({error})", self.proxy.as_deref().unwrap_or_default()),
            })?;
        let config = Agent::config_builder()
            .proxy(proxy)
            .http_status_as_error(false)
            .timeout_resolve(Some(self.connect_timeout))
            .timeout_connect(Some(self.connect_timeout))
            .timeout_recv_response(Some(self.read_timeout))
            .timeout_per_read(Some(self.read_timeout));
        Ok(config.build().into())
    }
}

/// Downloads `files` into `folder`, which is created if needed; files that are there with the right contents stay.
///
/// # Errors
/// [`DataError::Download`], listing each mirror with its reason, if no mirror gives a file; [`DataError::Io`]
/// if the folder cannot be written; [`DataError::Setting`] for an impossible proxy; [`DataError::Cancelled`]
/// if `progress` says so. Files that were complete by then stay, and so does the `.part` of the unfinished
/// one.
pub fn fetch_files(
    folder: &Path,
    files: &[RemoteFile<'_>],
    options: &DownloadOptions,
    progress: &Progress<'_>,
) -> Result<(), DataError> {
    let agent = options.agent()?;
    create_folder(folder).map_err(DataError::io(folder, "create folder"))?;
    for file in files {
        let target = folder.join(file.name);
        if is_right(&target, file)? {
            continue;
        }
        let part = folder.join(format!("{}.part", file.name));
        let download = Download { file, part, agent: &agent, progress };
        download.try_mirrors(&options.mirrors)?;
        fs::rename(&download.part, &target)
            .and_then(|()| sync_folder(folder))
            .map_err(DataError::io(&target, "create"))?;
    }
    Ok(())
}

/// Whether a file exists and has the wanted size and contents.
fn is_right(path: &Path, file: &RemoteFile<'_>) -> Result<bool, DataError> {
    Ok(length(path)? == Some(file.size) && sha256_of_file(path)? == file.sha256)
}

/// The length of a regular file, `None` if there is none.
fn length(path: &Path) -> Result<Option<u64>, DataError> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(Some(metadata.len()).filter(|_| metadata.is_file())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(DataError::io(path, "examine")(error)),
    }
}

fn sha256_of_file(path: &Path) -> Result<String, DataError> {
    let mut file = open_regular(path).map_err(DataError::io(path, "open"))?;
    sha256(&mut file).map_err(DataError::io(path, "read"))
}

/// The SHA-256 of everything a reader gives, in lower-case hexadecimal digits.
pub(super) fn sha256(reader: &mut dyn Read) -> io::Result<String> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            Ok(count) => hash.update(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// The download of one file.
struct Download<'a> {
    file: &'a RemoteFile<'a>,
    part: PathBuf,
    agent: &'a Agent,
    progress: &'a Progress<'a>,
}

/// How one request ended, when neither this machine nor the caller stopped it.
enum Outcome {
    /// The part file is complete and right.
    Complete,
    /// The part file is not complete, for this reason, but asking the same mirror once more can help.
    AskAgain(String),
    /// The part file is not complete, for this reason, and this mirror will not help.
    GiveUp(String),
}
use Outcome::{AskAgain, Complete, GiveUp};

impl Download<'_> {
    fn try_mirrors(&self, mirrors: &[String]) -> Result<(), DataError> {
        let mut attempts = Vec::new();
        for mirror in mirrors {
            match self.try_mirror(mirror)? {
                None => return Ok(()),
                Some(reason) => attempts.push(MirrorFailure { mirror: mirror.clone(), reason }),
            }
        }
        Err(DataError::Download { file: self.file.name.to_owned(), attempts })
    }

    /// Completes the part file, or says why this mirror could not.
    fn try_mirror(&self, mirror: &str) -> Result<Option<String>, DataError> {
        let address = format!("{}/{}", mirror.trim_end_matches('/'), self.file.name);
        let mut last_reason = String::new();
        for _ in 0..TRIES_PER_MIRROR {
            match self.request(&address)? {
                Complete => return Ok(None),
                GiveUp(reason) => return Ok(Some(reason)),
                AskAgain(reason) => last_reason = reason,
            }
        }
        Ok(Some(format!("{last_reason}; given up after {TRIES_PER_MIRROR} requests")))
    }

    /// Asks for what is missing, appends it to the part file, and checks that file if it is complete then.
    fn request(&self, address: &str) -> Result<Outcome, DataError> {
        let size = self.file.size;
        // A part that is a link, or has another name too, is somebody else's file: it is not continued, but replaced.
        let own = append(&self.part).is_ok();
        let mut have = length(&self.part)?.filter(|_| own).unwrap_or(0);
        if have > size {
            self.remove_part()?;
            have = 0;
        }
        let mut resumed = have > 0;
        if have < size || size == 0 {
            let mut request = self.agent.get(address).header(header::ACCEPT_ENCODING, "identity");
            if resumed {
                request = request.header(header::RANGE, format!("bytes={have}-"));
            }
            let response = match request.call() {
                Ok(response) => response,
                Err(error) => return Ok(GiveUp(error.to_string())),
            };
            match response.status() {
                // The whole file, asked for or not: a mirror may ignore the range.
                StatusCode::OK => (have, resumed) = (0, false),
                StatusCode::PARTIAL_CONTENT if resumed => {
                    let range = response.headers().get(header::CONTENT_RANGE);
                    let range = range.and_then(|value| value.to_str().ok()).unwrap_or("no range");
                    if !range_fits(range, have, size) {
                        self.remove_part()?;
                        let reason = format!("expected the range from {have} of {size} bytes, found {range}");
                        return Ok(AskAgain(reason));
                    }
                }
                status @ StatusCode::RANGE_NOT_SATISFIABLE if resumed => {
                    self.remove_part()?;
                    return Ok(AskAgain(format!("HTTP status {status}")));
                }
                status => return Ok(GiveUp(format!("HTTP status {status}"))),
            }
            let (_, body) = response.into_parts();
            if let Some(announced) = body.content_length()
                && announced != size - have
            {
                return Ok(GiveUp(format!("expected {} bytes, found {announced} announced", size - have)));
            }
            if let Some(outcome) = self.receive(body.into_reader(), have)? {
                return Ok(outcome);
            }
        }
        let sha256 = sha256_of_file(&self.part)?;
        if sha256 == self.file.sha256 {
            return Ok(Complete);
        }
        self.remove_part()?;
        let reason = format!("expected SHA-256 {}, found {sha256}", self.file.sha256);
        // The part that was there before may be to blame, so a mirror is judged only by a whole file of its own.
        Ok(if resumed { AskAgain(reason) } else { GiveUp(reason) })
    }

    /// Writes a body to the part file from `start` on; `None` means that the file has its full size now.
    fn receive(&self, mut body: impl Read, start: u64) -> Result<Option<Outcome>, DataError> {
        let size = self.file.size;
        let event = |done| ProgressEvent {
            stage: self.file.name,
            done,
            total: Some(size),
            unit: ProgressUnit::Bytes,
        };
        report(self.progress, event(start))?;
        // A part file is either continued or replaced by a new file; it is never partly overwritten.
        let part = if start > 0 { append(&self.part) } else { create_anew(&self.part) };
        let mut part = part.map_err(DataError::io(&self.part, "open"))?;
        let mut buffer = vec![0; 1 << 16];
        let mut have = start;
        let mut reported = Instant::now();
        loop {
            let count = match body.read(&mut buffer) {
                Ok(0) if have == size => break,
                Ok(0) => return Ok(Some(cut_off(start, have, size, "the body ended"))),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // The file is complete, so an error at the end of the connection does not matter.
                Err(_) if have == size => break,
                Err(error) => return Ok(Some(cut_off(start, have, size, &error.to_string()))),
            };
            if count as u64 > size - have {
                drop(part);
                self.remove_part()?;
                return Ok(Some(GiveUp(format!("expected {size} bytes, found more"))));
            }
            part.write_all(&buffer[..count]).map_err(DataError::io(&self.part, "write"))?;
            have += count as u64;
            if have == size || reported.elapsed() >= REPORT_INTERVAL {
                reported = Instant::now();
                report(self.progress, event(have))?;
            }
        }
        part.sync_all().map_err(DataError::io(&self.part, "write"))?;
        Ok(None)
    }

    fn remove_part(&self) -> Result<(), DataError> {
        match fs::remove_file(&self.part) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(DataError::io(&self.part, "remove")(error))
            }
            _ => Ok(()),
        }
    }
}

/// A body that ended early: worth another request if it brought something.
fn cut_off(start: u64, have: u64, size: u64, why: &str) -> Outcome {
    let reason = format!("expected {size} bytes, found {have} ({why})");
    if have > start { AskAgain(reason) } else { GiveUp(reason) }
}

/// Whether a Content-Range header (`bytes FIRST-LAST/TOTAL`) continues a file of `size` bytes from `start` to
/// its end.
fn range_fits(header: &str, start: u64, size: u64) -> bool {
    let parse = || {
        let (range, total) = header.strip_prefix("bytes ")?.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        Some((first.parse::<u64>().ok()?, last.parse::<u64>().ok()?, total))
    };
    parse().is_some_and(|(first, last, total)| {
        let whole = total == "*" || total.parse() == Ok(size);
        first == start && last.checked_add(1) == Some(size) && whole
    })
}

#[cfg(test)]
mod tests;
