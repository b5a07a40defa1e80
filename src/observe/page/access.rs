//! [`PageAccess`]: which requests are answered.
//!
//! | attack | what refuses it |
//! |---|---|
//! | a program or a user that can connect, and does not know the URL | the cookie, which only the key from the URL's fragment buys |
//! | a foreign site that makes a browser send requests here | `SameSite=Strict`, `Sec-Fetch-Site`, `Origin` |
//! | a foreign name that resolves to this machine (DNS rebinding) | the list of hosts |
//!
//! Ports of `Host` are not compared: a tunnel has another one here than there. An origin's host and port must be those of
//! `Host`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use hyper::{
    HeaderMap, Method,
    header::{COOKIE, HOST, HeaderName, ORIGIN},
    http::uri::Authority,
};
use subtle::ConstantTimeEq;

use crate::error::{Error, ErrorKind, Result};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// 128 random bits in hexadecimal digits.
struct Secret(String);

impl Secret {
    fn random() -> Result<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)
            .map_err(|error| Error::new(ErrorKind::Internal, format!("no random numbers from the system: {error}")))?;
        Ok(Self(format!("{:032x}", u128::from_ne_bytes(bytes))))
    }

    fn is(&self, other: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(other).into()
    }
}

/// The secrets of a page, and the hosts that it is reached by.
pub(super) struct PageAccess {
    key: Secret,
    session: Secret,
    hosts: Vec<String>,
}

impl PageAccess {
    pub(super) fn new(hosts: &[String]) -> Result<Self> {
        for host in hosts {
            let is_host = host.parse::<Authority>().is_ok_and(|known| known.host() == host && !host.is_empty());
            if !is_host {
                let text = format!(
                    "`{host}` is no host name: give a page's host without a port or a scheme, such as `gpu-3.lan`"
                );
                return Err(Error::new(ErrorKind::Setup, text));
            }
        }
        let hosts = hosts.iter().map(|host| host.to_ascii_lowercase()).collect();
        Ok(Self { key: Secret::random()?, session: Secret::random()?, hosts })
    }

    pub(super) fn url(&self, mut address: SocketAddr) -> String {
        // `0.0.0.0` and `::` stand for all addresses of the machine, and are no host of a URL.
        match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }
        format!("http://{address}/#key={}", self.key.0)
    }

    /// Whether `Host` and the origin are the page's own. `local` is the address that the client connected to.
    pub(super) fn is_own_site(&self, method: &Method, headers: &HeaderMap, local: SocketAddr) -> bool {
        let Some(host) = only(headers, &HOST).and_then(|host| host.parse::<Authority>().ok()) else { return false };
        if !self.is_known_host(host.host(), local) {
            return false;
        }
        let changes = !matches!(*method, Method::GET | Method::HEAD);
        match (headers.contains_key(ORIGIN), only(headers, &ORIGIN)) {
            (false, _) => !changes,
            (true, None) => false,
            (true, Some(origin)) => {
                let at = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
                at.is_some_and(|at| at.eq_ignore_ascii_case(host.as_str()))
            }
        }
    }

    fn is_known_host(&self, host: &str, local: SocketAddr) -> bool {
        // One that was added may be an address: behind a forwarded port, that of the host differs from the local one.
        if self.hosts.iter().any(|known| known.eq_ignore_ascii_case(host)) {
            return true;
        }
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        match bare.parse::<IpAddr>() {
            Ok(address) => address.is_loopback() || address == local.ip().to_canonical(),
            Err(_) => host.eq_ignore_ascii_case("localhost"),
        }
    }

    /// Whether a request comes from a page that knows the key.
    pub(super) fn has_session(&self, headers: &HeaderMap, cookie: &str) -> bool {
        let is_own = match headers.get(SEC_FETCH_SITE) {
            None => true,
            Some(site) => site == "same-origin" || site == "none",
        };
        let texts = headers.get_all(COOKIE).iter().filter_map(|text| text.to_str().ok());
        let mut values = texts.flat_map(|text| text.split(';')).filter_map(|pair| pair.trim().split_once('='));
        is_own && values.any(|(name, value)| name == cookie && self.session.is(value.as_bytes()))
    }

    /// The cookie for a key, if it is the right one.
    pub(super) fn exchange(&self, key: &[u8], cookie: &str) -> Option<String> {
        let session = &self.session.0;
        let is_right = self.key.is(key.trim_ascii());
        is_right.then(|| format!("{cookie}={session}; HttpOnly; SameSite=Strict; Path=/"))
    }
}

/// The value of a header that occurs once.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 7070);

    fn answers(method: Method, headers: &[(HeaderName, &str)]) -> bool {
        let access = PageAccess::new(&["gpu-3.lan".into()]).unwrap();
        let headers = headers.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
        access.is_own_site(&method, &headers, LOCAL)
    }

    #[test]
    fn hosts_are_loopback_or_listed() {
        for host in
            ["127.0.0.1:7070", "localhost:7070", "localhost", "LOCALHOST:1", "[::1]:7070", "gpu-3.lan:80", "GPU-3.lan"]
        {
            assert!(answers(Method::GET, &[(HOST, host)]), "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "gpu-3.lan.evil.example",
            "10.0.0.1:7070",
            "[2001:db8::1]",
            "",
            "a b",
            "localhost@evil.example",
        ] {
            assert!(!answers(Method::GET, &[(HOST, host)]), "{host}");
        }
        assert!(!answers(Method::GET, &[]));
        assert!(!answers(Method::GET, &[(HOST, "localhost"), (HOST, "evil.example")]));
    }

    #[test]
    fn what_changes_something_needs_the_own_origin() {
        let own = [(HOST, "localhost:7070"), (ORIGIN, "http://localhost:7070")];
        for method in [Method::POST, Method::PUT, Method::DELETE, Method::PATCH, Method::OPTIONS] {
            assert!(!answers(method.clone(), &own[..1]), "{method}");
            assert!(answers(method, &own));
        }
        for foreign in
            ["http://evil.example", "http://localhost:7071", "null", "localhost:7070", "http://localhost:7070/", ""]
        {
            assert!(!answers(Method::POST, &[own[0].clone(), (ORIGIN, foreign)]), "{foreign}");
            assert!(!answers(Method::GET, &[own[0].clone(), (ORIGIN, foreign)]), "{foreign}");
        }
    }

    #[test]
    fn a_page_that_is_reached_by_another_address_is_its_own_host() {
        let access = PageAccess::new(&[]).unwrap();
        let headers = HeaderMap::from_iter([(HOST, "192.168.7.5:7070".parse().unwrap())]);
        assert!(access.is_own_site(&Method::GET, &headers, "192.168.7.5:7070".parse().unwrap()));
        assert!(!access.is_own_site(&Method::GET, &headers, "192.168.7.6:7070".parse().unwrap()));
    }

    #[test]
    fn an_address_that_was_added_is_a_host() {
        let access = PageAccess::new(&["203.0.113.5".into()]).unwrap();
        let answers = |host: &str| {
            let headers = HeaderMap::from_iter([(HOST, host.parse().unwrap())]);
            access.is_own_site(&Method::GET, &headers, "172.17.0.2:7070".parse().unwrap())
        };
        assert!(answers("203.0.113.5:80") && !answers("203.0.113.6:80"));
    }

    #[test]
    fn the_url_of_all_addresses_is_one_that_is_answered() {
        let access = PageAccess::new(&[]).unwrap();
        for (all, begins) in [("0.0.0.0:7070", "http://127.0.0.1:7070/#"), ("[::]:7070", "http://[::1]:7070/#")] {
            let url = access.url(all.parse().unwrap());
            assert!(url.starts_with(begins), "{url}");
        }
    }

    #[test]
    fn only_the_key_buys_the_cookie() {
        let access = PageAccess::new(&[]).unwrap();
        let url = access.url(LOCAL);
        let (_, key) = url.split_once("#key=").unwrap();
        assert_eq!(key.len(), 32);
        let cookie = access.exchange(key.as_bytes(), "wakeline").unwrap();
        assert!(cookie.ends_with("; HttpOnly; SameSite=Strict; Path=/"), "{cookie}");
        let (pair, _) = cookie.split_once(';').unwrap();
        assert!(!pair.contains(key), "the cookie is no key");
        let with = |pair: &str| HeaderMap::from_iter([(COOKIE, pair.parse().unwrap())]);
        assert!(access.has_session(&with(pair), "wakeline"));
        assert!(access.has_session(&with(&format!("other=1; {pair}")), "wakeline"));
        for wrong in ["", "wakeline=", &pair[..pair.len() - 1], &format!("x{pair}"), &format!("wakeline={key}")] {
            assert!(!access.has_session(&with(wrong), "wakeline"), "{wrong}");
        }
        let mut foreign = with(pair);
        foreign.insert(SEC_FETCH_SITE, "same-site".parse().unwrap());
        assert!(!access.has_session(&foreign, "wakeline"));
        for wrong in ["", &key[1..], &key.to_uppercase().replace(char::is_numeric, "x")] {
            assert!(access.exchange(wrong.as_bytes(), "wakeline").is_none());
        }
        let other = PageAccess::new(&[]).unwrap();
        assert!(other.exchange(key.as_bytes(), "wakeline").is_none());
    }

    #[test]
    fn a_host_is_a_name() {
        for wrong in ["", "gpu:80", "http://gpu", "a b", "gpu/path", "user@gpu"] {
            assert_eq!(PageAccess::new(&[wrong.into()]).err().unwrap().kind(), ErrorKind::Setup, "{wrong}");
        }
    }
}
